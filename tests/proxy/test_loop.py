"""The whole loop through the application, with an engine without a model: call, reward, claim, commit, swap."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import SecretStr

from proxy.app import Application, create_app
from proxy.contract.claim import ClaimedBatch, ClaimRequest, CommitReply, decode, encode
from proxy.settings import BootstrapSettings, EngineSettings, RunSettings, ServerSettings, Settings
from tests.fakes.engine import FakeEngine
from tests.proxy.tokens.models import write_model
from tests.proxy.versions.publishing import commit_request, publish
from tests.running_app import bearer, running

ADMIN, RUN, TRAINER = "rl-admin-chosen", "rl-run-chosen", "rl-trainer-chosen"
HELLO = {"model": "policy", "messages": [{"role": "user", "content": "What is 2 + 2?"}]}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def engine(model: Path) -> FakeEngine:
    return FakeEngine(lambda _request: [40, 41, 2], model_path=str(model))


@pytest.fixture
def app(tmp_path: Path, model: Path, engine: FakeEngine) -> Application:
    settings = Settings(
        server=ServerSettings(data_dir=tmp_path / "data"),
        bootstrap=BootstrapSettings(
            admin_key=SecretStr(ADMIN), run_key=SecretStr(RUN), trainer_key=SecretStr(TRAINER)
        ),
        engine=EngineSettings(health_interval_seconds=0.02),
        run=RunSettings(name="policy", model=str(model)),
    )
    return create_app(settings, engine=engine)


@pytest.fixture
async def client(app: Application) -> AsyncIterator[httpx.AsyncClient]:
    async with running(app, key=RUN) as opened:
        await until(lambda: ready(opened))
        yield opened


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    """Wait for a condition that the application reaches by itself."""
    async with asyncio.timeout(20):
        while not await condition():
            await asyncio.sleep(0.01)


async def ready(client: httpx.AsyncClient) -> bool:
    return (await client.get("/readyz")).status_code == 200


async def trainer_post(client: httpx.AsyncClient, path: str, message: Any) -> bytes:
    answer = await client.post(f"/api/v1/runs/policy/{path}", content=encode(message), headers=bearer(TRAINER))
    assert answer.status_code == 200, answer.text
    return answer.content


async def test_from_a_call_to_the_next_version(client: httpx.AsyncClient, engine: FakeEngine, tmp_path: Path) -> None:
    sessions = (await client.post("/v1/sessions", json={"n": 2})).json()["sessions"]
    for reward, session in enumerate(sessions):
        own = bearer(session["api_key"])
        answer = await client.post("/v1/chat/completions", json=HELLO, headers=own)
        assert answer.status_code == 200, answer.text
        completion = answer.json()
        assert completion["system_fingerprint"] == "policy@0"
        assert answer.headers["x-base-rl-session"] == session["id"]
        rewarded = await client.post("/v1/feedback", json={"reward": reward}, headers=own)
        assert rewarded.json()["session_id"] == session["id"]
        view = (await client.get(f"/v1/sessions/{session['id']}", headers=own)).json()
        assert (view["training"], [turn["id"] for turn in view["turns"]]) == ("ready", [completion["id"]])

    wish = ClaimRequest(trainer="test", want=2)
    batch = decode(await trainer_post(client, "claims", wish), ClaimedBatch)
    (group,) = batch.groups
    assert [trajectory.reward for trajectory in group.trajectories] == [0.0, 1.0]
    assert {trajectory.turns[0].output_ids for trajectory in group.trajectories} == {(40, 41, 2)}
    assert batch.claim_id is not None
    assert batch.engine is not None
    assert 0 < batch.engine.busy_seconds < batch.engine.seconds

    weights = publish(tmp_path / "data" / "weights")
    commit = commit_request([batch.claim_id], 0, weights)
    reply = decode(await trainer_post(client, "versions", commit), CommitReply)
    assert reply == CommitReply(version=1, repeated=False)

    async def serves_version_1() -> bool:
        return bool((await client.get("/readyz")).json()["serving_version"] == 1)

    await until(serves_version_1)
    assert ("load_weights", (weights.uri, engine.label)) in engine.calls
    completion = (await client.post("/v1/chat/completions", json=HELLO)).json()
    assert completion["system_fingerprint"] == "policy@1"

    late = await client.post("/v1/feedback", json={"reward": 0, "session_id": sessions[1]["id"]})
    assert (late.status_code, late.json()["effect"]) == (202, "recorded_after_training")
    view = (await client.get(f"/v1/sessions/{sessions[1]['id']}")).json()
    assert (view["consumed_by"], view["explanation"]) == (1, "It was trained: version 1 learnt from it.")
    metrics = (await client.get("/metrics")).text.splitlines()
    assert 'base_rl_swaps_total{result="loaded"} 1.0' in metrics
    assert 'base_rl_tokens_total{kind="output"} 9.0' in metrics
    assert 'base_rl_step_version{run="policy"} 1.0' in metrics
    assert 'base_rl_step{metric="loss",run="policy"} 0.25' in metrics
    assert "base_rl_engine_generations 0.0" in metrics


async def test_a_path_a_header_and_the_conversation_name_sessions(client: httpx.AsyncClient) -> None:
    by_path = await client.post("/sessions/task-1/v1/chat/completions", json=HELLO)
    by_header = await client.post("/chat/completions", json=HELLO, headers={"x-base-rl-session": "task-1"})
    assert by_path.headers["x-base-rl-session"] == by_header.headers["x-base-rl-session"]
    first = await client.post("/v1/chat/completions", json=HELLO)
    again = {
        "model": "policy",
        "messages": [
            *HELLO["messages"],
            first.json()["choices"][0]["message"],
            {"role": "user", "content": "Are you sure?"},
        ],
    }
    second = await client.post("/v1/chat/completions", json=again)
    assert second.status_code == 200, second.text
    assert first.headers["x-base-rl-session"] == second.headers["x-base-rl-session"]
    assert first.headers["x-base-rl-session"] != by_path.headers["x-base-rl-session"]
    view = (await client.get(f"/v1/sessions/{first.headers['x-base-rl-session']}")).json()
    assert [turn["continuation"] for turn in view["turns"]] == ["new", "exact"]
    named = (await client.get("/v1/sessions/task-1")).json()
    assert (named["external_id"], len(named["turns"])) == ("task-1", 2)


async def test_calls_get_503_while_the_engine_is_down_and_are_served_afterwards(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    engine.down = True
    await until(lambda: not_ready(client))
    for body in (HELLO, {**HELLO, "stream": True}):
        answer = await client.post("/v1/chat/completions", json=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_unavailable")
        assert int(answer.headers["retry-after"]) >= 1
    session = await client.post("/v1/sessions")
    assert (
        await client.post("/v1/feedback", json={"reward": 1, "session_id": session.json()["id"]})
    ).status_code == 201
    engine.down = False
    await until(lambda: ready(client))
    assert (await client.post("/v1/chat/completions", json=HELLO)).status_code == 200


async def not_ready(client: httpx.AsyncClient) -> bool:
    return not await ready(client)


async def test_stopping_records_what_still_generates(app: Application, engine: FakeEngine) -> None:
    async with running(app, key=RUN) as client:
        await until(lambda: ready(client))
        session = (await client.post("/v1/sessions")).json()
        engine.gate.clear()
        call = asyncio.create_task(
            client.post("/v1/chat/completions", json={**HELLO, "stream": True}, headers=bearer(session["api_key"]))
        )

        async def generating() -> bool:
            return bool(engine.requests)

        await until(generating)
        await app.services.calls.aclose()
        view = (await client.get(f"/v1/sessions/{session['id']}")).json()
        call.cancel()
        await asyncio.wait([call])
    assert [turn["state"] for turn in view["turns"]] == ["truncated"]
