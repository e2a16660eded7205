"""A canary on the whole proxy: its share of sessions, engines set apart, held keys, restarts without a trainer."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import SecretStr

from proxy.app import Application, create_app
from proxy.contract.policy import WeightsFormat
from proxy.settings import (
    BootstrapSettings,
    ConfigurationError,
    EngineSettings,
    NamedEngineSettings,
    ReleaseSettings,
    RunSettings,
    ServerSettings,
    Settings,
)
from tests.fakes.engine import FakeEngine
from tests.proxy.test_loop import ADMIN, HELLO, RUN, TRAINER, trainer_post, until
from tests.proxy.tokens.models import write_model
from tests.proxy.versions.publishing import fit_request, publish
from tests.running_app import bearer, running

CANARY = {"policy": "gated", "canary": {"share": 0.5, "sessions": 20}}


class Proxy:
    """A proxy whose engines have no model."""

    def __init__(self, app: Application, client: httpx.AsyncClient, weights: Path, form: WeightsFormat) -> None:
        self.app, self.client = app, client
        self._weights, self._form = weights, form

    async def commit(self, parent: int) -> None:
        weights = publish(self._weights, form=self._form)
        await trainer_post(self.client, "versions", fit_request((), parent, weights))

    async def session(self, reward: float | None = None, headers: dict[str, str] | None = None) -> str:
        """Let an agent make one call in a new session, and return the version that answered."""
        opened = await self.client.post("/v1/sessions", json={})
        session = opened.json()
        answer = await self.client.post(
            "/v1/chat/completions",
            json={**HELLO, "model": "policy"},
            headers=headers or bearer(session["api_key"]),
        )
        assert answer.status_code == 200, answer.text
        if reward is not None:
            posted = await self.client.post("/v1/feedback", json={"session_id": session["id"], "reward": reward})
            assert posted.status_code < 300, posted.text
        return str(answer.json()["system_fingerprint"])

    async def answered(self, count: int) -> Counter[str]:
        return Counter([await self.session() for _ in range(count)])

    async def api(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        url = f"/api/v1/runs/policy{path}"
        admin = bearer(ADMIN)
        answer = await (
            self.client.get(url, headers=admin) if body is None else self.client.post(url, json=body, headers=admin)
        )
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    async def page(self) -> str:
        """Return the page of the versions, as an administrator sees it."""
        own = {"origin": "http://proxy.test"}
        await self.client.post("/admin/login", data={"key": ADMIN}, headers=own)
        answer = await self.client.get("/admin/runs/policy/versions")
        assert answer.status_code == 200, answer.text
        return answer.text

    async def decide(self, **form: str) -> httpx.Response:
        """Send the form of the page."""
        own = {"origin": "http://proxy.test"}
        return await self.client.post("/admin/runs/policy/versions", data=form, headers=own)

    async def states(self) -> list[str]:
        return [each["state"] for each in reversed((await self.api("/versions"))["versions"])]

    async def until_states(self, *states: str) -> None:
        async def reached() -> bool:
            return await self.states() == list(states)

        await until(reached)

    async def until_answered_by(self, *versions: str) -> None:
        async def reached() -> bool:
            return set(await self.answered(12)) == set(versions)

        await until(reached)


@asynccontextmanager
async def open_proxy(
    tmp_path: Path, engines: dict[str, FakeEngine], release: dict[str, Any], kind: Any = "full"
) -> AsyncIterator[Proxy]:
    model = write_model(tmp_path / "model")
    settings = Settings(
        server=ServerSettings(data_dir=tmp_path / "data"),
        bootstrap=BootstrapSettings(
            admin_key=SecretStr(ADMIN), run_key=SecretStr(RUN), trainer_key=SecretStr(TRAINER)
        ),
        engine=EngineSettings(health_interval_seconds=0.02),
        engines={name: NamedEngineSettings(url=url) for name, url in zip("abc", engines, strict=False)},
        run=RunSettings(name="policy", model=str(model), weights=kind, release=ReleaseSettings(**release)),
    )
    app = create_app(settings, engines=engines)
    form = WeightsFormat.ADAPTER if kind == "adapter" else WeightsFormat.HUGGINGFACE
    async with running(app, key=RUN) as client:

        async def is_ready() -> bool:
            return (await client.get("/readyz")).status_code == 200

        await until(is_ready)
        yield Proxy(app, client, tmp_path / "data" / "weights", form)


def make_engines(tmp_path: Path, count: int) -> dict[str, FakeEngine]:
    model = write_model(tmp_path / "model")
    engines = {}
    for number in range(count):
        engine = FakeEngine(lambda _request: [40, 41, 2], model_path=str(model), address=f"http://engine-{number}")
        engine.max_adapters = 4
        engines[engine.name] = engine
    return engines


async def test_a_canary_of_adapters_answers_a_share_on_the_same_engine(tmp_path: Path) -> None:
    async with open_proxy(tmp_path, make_engines(tmp_path, 1), CANARY, "adapter") as proxy:
        await proxy.commit(0)
        await proxy.until_states("serving", "canary")
        await proxy.until_answered_by("policy@0", "policy@1")
        for _ in range(60):
            await proxy.session(1.0)
        await proxy.until_states("retired", "serving")
        await proxy.until_answered_by("policy@1")


async def test_a_bad_canary_on_an_engine_set_apart_is_refused_and_the_engine_comes_back(tmp_path: Path) -> None:
    async with open_proxy(tmp_path, make_engines(tmp_path, 2), CANARY) as proxy:
        await proxy.commit(0)
        await proxy.until_answered_by("policy@0", "policy@1")
        named = await proxy.client.post("/v1/chat/completions", json={**HELLO, "model": "policy@1"})
        assert named.json()["system_fingerprint"] == "policy@1"
        while (await proxy.states())[1] == "canary":
            version = await proxy.session()
            session = await proxy.client.post("/v1/sessions", json={})
            key = bearer(session.json()["api_key"])
            answer = await proxy.client.post("/v1/chat/completions", json={**HELLO, "model": "policy"}, headers=key)
            version = answer.json()["system_fingerprint"]
            reward = 1.0 if version == "policy@0" else 0.0
            await proxy.client.post("/v1/feedback", json={"session_id": session.json()["id"], "reward": reward})
        assert await proxy.states() == ["serving", "rejected"]
        await proxy.until_answered_by("policy@0")
        gates = (await proxy.api("/versions/1/gates"))["findings"]
        assert {each["gate"]: each["state"] for each in gates} == {"canary": "failed", "guards": "passed"}
        page = await proxy.page()
        assert "it is worse: mean reward -1.000" in page
        assert '<svg class="confidence"' in page
        engines = (await proxy.client.get("/api/v1/engines", headers=bearer(ADMIN))).json()["engines"]
        assert [list(each["versions"].values()) for each in engines] == [[0], [0]]


async def test_a_key_and_a_share_are_held_while_others_move_on(tmp_path: Path) -> None:
    async with open_proxy(tmp_path, make_engines(tmp_path, 1), {}, "adapter") as proxy:
        await proxy.commit(0)
        await proxy.until_answered_by("policy@1")
        made = await proxy.client.post("/api/v1/keys", json={"kind": "run", "run": "policy"}, headers=bearer(ADMIN))
        key = made.json()
        hold = await proxy.api("/versions/1/hold", {"reason": "a customer", "key_id": key["id"]})
        await proxy.api("/versions/1/hold", {"reason": "A/B", "share": 0.5})
        await proxy.commit(1)
        await proxy.until_answered_by("policy@1", "policy@2")
        assert {await proxy.session(headers=bearer(key["key"])) for _ in range(8)} == {"policy@1"}
        assert len((await proxy.api("/versions/holds"))["holds"]) == 2
        secret = (await proxy.api("/versions/evaluations/secret"))["secret"]
        assert secret.startswith("whsec_"), "for an evaluator, of every run"
        for each in (await proxy.api("/versions/holds"))["holds"]:
            await proxy.api(f"/versions/holds/{each['id']}/release", {"reason": "done"})
        await proxy.until_answered_by("policy@2")
        assert hold["version"] == 1


@pytest.mark.parametrize("how", ["immediate", "gated", "pinned"])
async def test_restarted_without_a_trainer_it_serves_the_version_that_served(tmp_path: Path, how: str) -> None:
    release = CANARY if how == "gated" else {}
    kind = "adapter" if how == "gated" else "full"
    expected = {"immediate": "policy@2", "gated": "policy@0", "pinned": "policy@1"}[how]
    async with open_proxy(tmp_path, make_engines(tmp_path, 1), release, kind) as proxy:
        await proxy.commit(0)
        await proxy.commit(1)
        if how == "gated":
            await proxy.until_states("serving", "candidate", "canary")
            await proxy.api("/versions/2/reject", {"reason": "not yet"})
            await proxy.until_states("serving", "canary", "rejected")
            await proxy.api("/versions/1/reject", {"reason": "not yet"})
        if how == "pinned":
            await proxy.page()
            refused = await proxy.decide(change="pin", version="1")
            assert (refused.status_code, "give a reason" in refused.text) == (400, True)
            assert (await proxy.decide(change="pin", version="1", reason="demo")).status_code == 303
        await proxy.until_answered_by(expected)
    # Both are new processes: the engine holds its base model only.
    async with open_proxy(tmp_path, make_engines(tmp_path, 1), release, kind) as proxy:
        await proxy.until_answered_by(expected)


async def test_a_canary_that_no_engine_could_take_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="a candidate that is tried needs an engine of its own"):
        async with open_proxy(tmp_path, make_engines(tmp_path, 1), CANARY):
            await asyncio.sleep(0)
