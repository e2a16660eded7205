"""Calls that name an older version, on the whole proxy."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import httpx
import msgspec
import pytest
from pydantic import SecretStr
from sqlalchemy import select, update

from proxy.app import Application, create_app
from proxy.contract.claim import ClaimedBatch, ClaimRequest, decode
from proxy.contract.policy import Probe, WeightsFormat
from proxy.database.tables import PolicyVersionRow, SessionRow, TurnRow
from proxy.settings import BootstrapSettings, EngineSettings, RunSettings, ServerSettings, Settings
from tests.fakes.engine import FakeEngine
from tests.proxy.test_loop import ADMIN, HELLO, RUN, TRAINER, trainer_post, until
from tests.proxy.tokens.models import write_model
from tests.proxy.versions.publishing import fit_request, publish
from tests.running_app import bearer, running


class Site:
    """A proxy with one run, on an engine without a model that has room for two adapters."""

    def __init__(self, app: Application, engine: FakeEngine, client: httpx.AsyncClient, weights: Path) -> None:
        self.app = app
        self.engine = engine
        self.client = client
        self._weights = weights

    async def commit(self, parent: int, form: WeightsFormat = WeightsFormat.ADAPTER) -> str:
        """Commit the successor of `parent`, wait until it is served, and return its directory."""
        weights = publish(self._weights, form=form)
        self.engine.scores[weights.uri] = -3.0 - parent
        request = msgspec.structs.replace(
            fit_request((), parent, weights), probe=Probe(ids=(3, 1), logprobs=(-3.0 - parent,))
        )
        await trainer_post(self.client, "versions", request)

        async def is_served() -> bool:
            return bool((await self.client.get("/readyz")).json().get("serving_version") == parent + 1)

        await until(is_served)
        return weights.uri

    async def call(self, model: str, headers: dict[str, str] | None = None) -> httpx.Response:
        return await self.client.post("/v1/chat/completions", json={**HELLO, "model": model}, headers=headers)

    async def fingerprint(self, model: str) -> str:
        answer = await self.call(model)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["system_fingerprint"])

    async def rows(self, statement: Any) -> list[Any]:
        return await self.app.services.database.read(lambda connection: list(connection.execute(statement).all()))


@asynccontextmanager
async def open_site(tmp_path: Path, kind: Literal["full", "adapter"] = "adapter") -> AsyncIterator[Site]:
    model = write_model(tmp_path / "model")
    engine = FakeEngine(lambda _request: [40, 41, 2], model_path=str(model))
    engine.max_adapters = 2
    settings = Settings(
        server=ServerSettings(data_dir=tmp_path / "data"),
        bootstrap=BootstrapSettings(
            admin_key=SecretStr(ADMIN), run_key=SecretStr(RUN), trainer_key=SecretStr(TRAINER)
        ),
        engine=EngineSettings(health_interval_seconds=0.02),
        run=RunSettings(name="policy", model=str(model), weights=kind),
    )
    app = create_app(settings, engine=engine)
    async with running(app, key=RUN) as client:

        async def is_ready() -> bool:
            return (await client.get("/readyz")).status_code == 200

        await until(is_ready)
        yield Site(app, engine, client, tmp_path / "data" / "weights")


async def test_older_versions_come_and_go_beside_the_newest(tmp_path: Path) -> None:
    async with open_site(tmp_path) as site:
        for parent in range(3):
            await site.commit(parent)
        run_id = site.app.services.served.first_run.id
        for version in (1, 3, 2, 1, 0, 1):
            assert await site.fingerprint(f"policy@{version}") == f"policy@{version}"
            assert site.engine.requests[-1].adapter == (f"{run_id}@{version}" if version else None)
        assert await site.fingerprint("policy") == "policy@3"
        # Room for two: the newest version and one older one. Each older one pushed out the one before.
        unloaded = [name for kind, name in site.engine.calls if kind == "unload_adapter"]
        assert [name for name in unloaded if name == f"{run_id}@1"]
        assert f"{run_id}@3" in site.engine.loras
        spans = await site.rows(select(TurnRow.spans).order_by(TurnRow.id))
        assert [row.spans[0][0] for row in spans] == [1, 3, 2, 1, 0, 1, 3]
        asked = await site.rows(select(PolicyVersionRow.asked_at).order_by(PolicyVersionRow.version))
        assert [row.asked_at is not None for row in asked] == [True, True, True, False]


async def test_versions_that_cannot_be_asked_for_are_404_with_those_that_can(tmp_path: Path) -> None:
    async with open_site(tmp_path) as site:
        for parent in range(3):
            await site.commit(parent)
        await site.app.services.database.commit(
            lambda connection: connection.execute(
                update(PolicyVersionRow).where(PolicyVersionRow.version == 1).values(weights_removed_at=1.0)
            )
        )
        for version in (1, 999):
            answer = await site.call(f"policy@{version}")
            error = answer.json()["error"]
            assert (answer.status_code, error["code"]) == (404, "model_not_found")
            assert error["message"] == (
                f"version {version} of the run 'policy' cannot be served: ask for 'policy',"
                " or for version 0 and 2 to 3"
            )
        assert await site.rows(select(SessionRow.id)) == []


async def test_an_engine_of_whole_weights_answers_as_the_version_that_it_holds(tmp_path: Path) -> None:
    async with open_site(tmp_path, "full") as site:
        await site.commit(0, WeightsFormat.HUGGINGFACE)
        assert await site.fingerprint("policy@1") == "policy@1"
        answer = await site.call("policy@0")
        assert answer.status_code == 404
        assert "engines hold one version of whole weights each: ask for 'policy', or for version 1" in answer.text


async def test_an_older_version_that_the_engine_computes_wrongly_is_not_served(tmp_path: Path) -> None:
    async with open_site(tmp_path) as site:
        uri = await site.commit(0)
        await site.commit(1)
        run_id = site.app.services.served.first_run.id

        async def is_unloaded() -> bool:
            return f"{run_id}@1" not in site.engine.loras

        site.engine.loras.pop(f"{run_id}@1", None)
        await until(is_unloaded)
        site.engine.scores[uri] = -9.0
        answer = await site.call("policy@1")
        assert answer.status_code == 502, answer.text
        assert f"{run_id}@1" not in site.engine.loras
        assert await site.fingerprint("policy") == "policy@2"


async def test_an_engine_that_was_started_again_is_given_the_version_again(tmp_path: Path) -> None:
    async with open_site(tmp_path) as site:
        await site.commit(0)
        await site.commit(1)
        run_id = site.app.services.served.first_run.id
        assert await site.fingerprint("policy@1") == "policy@1"
        del site.engine.loras[f"{run_id}@1"]
        lost = await site.call("policy@1")
        assert (lost.status_code, lost.json()["error"]["code"]) == (503, "adapter_not_loaded")
        async with asyncio.timeout(10):
            while (answer := await site.call("policy@1")).status_code == 503:
                await asyncio.sleep(0.01)
        assert answer.json()["system_fingerprint"] == "policy@1"


@pytest.mark.parametrize(("max_staleness", "training"), [(1, "leased"), (0, "stale")])
async def test_sessions_of_older_versions_are_trained_if_they_are_not_too_stale(
    tmp_path: Path, max_staleness: int, training: str
) -> None:
    """A session that was answered by version 0 at the caller's wish is as stale as one that took that long."""
    async with open_site(tmp_path) as site:
        await site.commit(0)
        session = (await site.client.post("/v1/sessions", json={})).json()
        own = bearer(session["api_key"])
        assert (await site.call("policy@0", own)).json()["system_fingerprint"] == "policy@0"
        await site.client.post("/v1/feedback", json={"reward": 1}, headers=own)
        request = ClaimRequest(trainer="test", want=1, max_staleness=max_staleness)
        batch = decode(await trainer_post(site.client, "claims", request), ClaimedBatch)
        rows = await site.rows(select(SessionRow.training))
        assert [row.training for row in rows] == [training]
        if training == "leased":
            (trajectory,) = [each for group in batch.groups for each in group.trajectories]
            assert [span.version for turn in trajectory.turns for span in turn.spans] == [0]
