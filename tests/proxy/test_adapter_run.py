"""The whole way of an adapter run: a call of the base model, a commit of an adapter, a call that names it."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from pydantic import SecretStr

from proxy.app import create_app
from proxy.contract.claim import ClaimedBatch, ClaimRequest, decode
from proxy.contract.policy import Probe, WeightsFormat
from proxy.settings import BootstrapSettings, EngineSettings, RunSettings, ServerSettings, Settings
from tests.fakes.engine import FakeEngine
from tests.proxy.test_loop import ADMIN, HELLO, RUN, TRAINER, ready, trainer_post, until
from tests.proxy.tokens.models import write_model
from tests.proxy.versions.publishing import commit_request, fit_request, publish
from tests.running_app import bearer, running


@pytest.mark.parametrize("is_broken", [False, True])
async def test_calls_name_the_adapter_of_the_newest_version_that_is_proved(tmp_path: Path, is_broken: bool) -> None:
    model = write_model(tmp_path / "model")
    engine = FakeEngine(lambda _request: [40, 41, 2], model_path=str(model))
    engine.ignores_adapters = is_broken
    settings = Settings(
        server=ServerSettings(data_dir=tmp_path / "data"),
        bootstrap=BootstrapSettings(
            admin_key=SecretStr(ADMIN), run_key=SecretStr(RUN), trainer_key=SecretStr(TRAINER)
        ),
        engine=EngineSettings(health_interval_seconds=0.02),
        run=RunSettings(name="policy", model=str(model), weights="adapter"),
    )
    async with running(create_app(settings, engine=engine), key=RUN) as client:
        await until(lambda: ready(client))
        session = (await client.post("/v1/sessions", json={})).json()
        own = bearer(session["api_key"])
        answer = await client.post("/v1/chat/completions", json=HELLO, headers=own)
        assert answer.json()["system_fingerprint"] == "policy@0"
        await client.post("/v1/feedback", json={"reward": 1}, headers=own)
        batch = decode(await trainer_post(client, "claims", ClaimRequest(trainer="test", want=1)), ClaimedBatch)
        assert batch.claim_id is not None
        weights = publish(tmp_path / "data" / "weights", form=WeightsFormat.ADAPTER)
        engine.scores[weights.uri] = -3.0
        probe = Probe(ids=(3, 1, 4), logprobs=(-3.0, -3.0))
        commit = msgspec.structs.replace(commit_request([batch.claim_id], 0, weights), probe=probe)
        await trainer_post(client, "versions", commit)

        async def is_settled() -> bool:
            health = (await client.get("/api/v1/health", headers=bearer(ADMIN))).json()
            served = (await client.get("/readyz")).json()["serving_version"]
            return any("other weights" in line for line in health["problems"]) if is_broken else served == 1

        await until(is_settled)
        answer = await client.post("/v1/chat/completions", json=HELLO)
        assert answer.status_code == 200, answer.text
        assert answer.json()["system_fingerprint"] == ("policy@0" if is_broken else "policy@1")
        assert (engine.requests[-1].adapter is None) is is_broken
        metrics = (await client.get("/metrics")).text.splitlines()
        assert f"base_rl_wrong_weights_total {float(is_broken)}" in metrics


async def test_a_run_that_begins_from_an_adapter_serves_it_as_version_0(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    engine = FakeEngine(lambda _request: [40, 41, 2], model_path=str(model))
    settings = Settings(
        server=ServerSettings(data_dir=tmp_path / "data"),
        bootstrap=BootstrapSettings(
            admin_key=SecretStr(ADMIN), run_key=SecretStr(RUN), trainer_key=SecretStr(TRAINER)
        ),
        engine=EngineSettings(health_interval_seconds=0.02),
        run=RunSettings(name="policy", model=str(model), weights="adapter"),
    )
    async with running(create_app(settings, engine=engine), key=RUN) as client:
        await until(lambda: ready(client))
        weights = publish(tmp_path / "data" / "weights", form=WeightsFormat.ADAPTER)
        engine.scores[weights.uri] = -3.0
        commit = fit_request((), 0, weights)
        await trainer_post(
            client, "versions", msgspec.structs.replace(commit, probe=Probe(ids=(3, 1), logprobs=(-3.0,)))
        )
        created = await client.post("/api/v1/runs", json={"name": "next", "from": "policy@1"}, headers=bearer(ADMIN))
        assert (created.status_code, created.json()["begun_from"]) == (201, "policy@1"), created.text
        made = await client.post("/api/v1/keys", json={"kind": "run", "run": "next"}, headers=bearer(ADMIN))
        key, hello = bearer(made.json()["key"]), {**HELLO, "model": "next"}

        async def is_served() -> bool:
            return (await client.post("/v1/chat/completions", json=hello, headers=key)).status_code == 200

        await until(is_served)
        answer = await client.post("/v1/chat/completions", json=hello, headers=key)
        assert answer.json()["system_fingerprint"] == "next@0"
        assert engine.requests[-1].adapter == f"{created.json()['id']}@0"
        # The base model's name is no name of a version that began from an adapter.
        refused = await client.post("/v1/chat/completions", json={**HELLO, "model": str(model)}, headers=key)
        assert (refused.status_code, "began from policy@1" in refused.text) == (404, True)
