from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Literal

import httpx
import pytest
from fastapi import FastAPI
from pydantic import SecretStr

from proxy.app import create_app
from proxy.database.probe import FRESH_SECONDS
from proxy.settings import (
    BootstrapSettings,
    ConfigurationError,
    DatabaseSettings,
    EngineSettings,
    RunSettings,
    ServerSettings,
    Settings,
)
from proxy.tokens.template import ChatTemplate
from tests.database import files_end_at
from tests.fakes.engine import FakeEngine
from tests.proxy.store import MovedClock
from tests.proxy.tokens.models import write_model
from tests.running_app import bearer, running

ADMIN, RUN, TRAINER = "rl-admin-chosen", "rl-run-chosen", "rl-trainer-chosen"


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


def settings_for(directory: Path, model: Path, **sections: Any) -> Settings:
    values = {
        "server": ServerSettings(data_dir=directory / "data", max_body_mib=1),
        "bootstrap": BootstrapSettings(
            admin_key=SecretStr(ADMIN), run_key=SecretStr(RUN), trainer_key=SecretStr(TRAINER)
        ),
        "run": RunSettings(name="policy", model=str(model), session_idle_seconds=60, reward_timeout_seconds=120),
    }
    return Settings(**{**values, **sections})


@pytest.fixture
def engine(model: Path) -> FakeEngine:
    return FakeEngine(lambda _request: [5, 6, 2], model_path=str(model))


@pytest.fixture
def app(tmp_path: Path, model: Path, engine: FakeEngine) -> FastAPI:
    return create_app(settings_for(tmp_path, model), engine=engine, clock=MovedClock())


@pytest.fixture
async def client(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    async with running(app, key=RUN) as opened:
        yield opened


async def test_the_bare_address_leads_to_the_admin_page(client: httpx.AsyncClient) -> None:
    answer = await client.get("/", headers={"authorization": ""})
    assert (answer.status_code, answer.headers["location"]) == (303, "/admin")


async def test_it_is_alive_and_counts_what_it_does(client: httpx.AsyncClient) -> None:
    assert (await client.get("/healthz", headers={"authorization": ""})).json() == {
        "status": "ok",
        "service": "base-rl",
    }
    created = (await client.post("/v1/sessions", json={"n": 2})).json()["sessions"]
    answer = await client.post("/v1/feedback", json={"reward": 1, "session_id": created[0]["id"]})
    assert answer.status_code == 201
    metrics = (await client.get("/metrics", headers={"authorization": ""})).text
    for line in (
        'base_rl_rewards_total{effect="recorded"} 1.0',
        'base_rl_requests_total{method="POST",route="/v1/sessions",status="201"} 1.0',
        'base_rl_sessions{run="policy",training="pending"} 1.0',
        'base_rl_sessions{run="policy",training="excluded"} 1.0',
    ):
        assert line in metrics.splitlines()


@pytest.mark.parametrize(("when_unavailable", "status"), [("refuse", 503), ("serve", 200)])
async def test_readiness_is_whether_a_call_would_be_served(
    tmp_path: Path, model: Path, engine: FakeEngine, when_unavailable: Literal["refuse", "serve"], status: int
) -> None:
    """With a full disk everything can be read, but no call can be recorded."""
    settings = settings_for(tmp_path, model, database=DatabaseSettings(when_unavailable=when_unavailable))
    async with running(create_app(settings, engine=engine, clock=MovedClock()), key=ADMIN) as client:
        async with asyncio.timeout(30):
            while (await client.get("/readyz")).status_code != 200:
                await asyncio.sleep(0.05)
        await asyncio.sleep(FRESH_SECONDS)
        with files_end_at(1):
            readiness = await client.get("/readyz")
            health = (await client.get("/api/v1/health")).json()
        assert readiness.status_code == status
        body = readiness.json()
        assert "disk" in (body["missing"]["store"] if status == 503 else body["unrecorded"])
        assert (health["database"], health["ready"], health["status"]) == ("unwritable", status == 200, "degraded")
        assert any("disk" in problem for problem in health["problems"])
        assert health["database_integrity"] == "ok"


async def test_bootstrap_keys_are_what_they_are_named(client: httpx.AsyncClient) -> None:
    assert (await client.post("/v1/sessions", headers=bearer(RUN))).status_code == 201
    assert (await client.post("/v1/sessions", headers=bearer(ADMIN))).status_code == 403
    assert (await client.post("/v1/sessions", headers=bearer(TRAINER))).status_code == 403
    assert (await client.get("/api/v1/runs", headers=bearer(ADMIN))).status_code == 200
    assert (await client.get("/api/v1/runs", headers=bearer("wrong"))).status_code == 401


async def test_errors_are_envelopes_everywhere(client: httpx.AsyncClient) -> None:
    for method, path, status in (
        ("GET", "/nowhere", 404),
        ("DELETE", "/v1/feedback", 405),
        ("POST", "/v1/feedback", 400),
        ("GET", "/v1/sessions/unknown", 404),
    ):
        answer = await client.request(method, path)
        assert answer.status_code == status
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
        assert answer.headers["x-request-id"]
    large = await client.post("/v1/feedback", content=b" " * (1 << 20) + b"{}")
    assert (large.status_code, large.json()["error"]["code"]) == (413, "payload_too_large")


async def test_the_address_for_agents_is_the_public_one(tmp_path: Path, model: Path, engine: FakeEngine) -> None:
    server = ServerSettings(data_dir=tmp_path / "data", public_url="https://rl.example.org/base/")
    app = create_app(settings_for(tmp_path, model, server=server), engine=engine)
    async with running(app, key=RUN) as client:
        created = (await client.post("/v1/sessions")).json()
    assert created["base_url"] == "https://rl.example.org/base/v1"


async def test_a_restart_keeps_everything(tmp_path: Path, model: Path, engine: FakeEngine) -> None:
    settings = settings_for(tmp_path, model)
    async with running(create_app(settings, engine=engine), key=RUN) as client:
        created = (await client.post("/v1/sessions", json={"task": "t"})).json()
        body = {"reward": 0.5, "session_id": created["id"], "idempotency_key": "k"}
        first = (await client.post("/v1/feedback", json=body)).json()
    async with running(create_app(settings, engine=engine), key=created["api_key"]) as client:
        assert (await client.get(f"/v1/sessions/{created['id']}")).json()["reward"] == 0.5
        assert (await client.post("/v1/feedback", json=body)).json() == first


async def test_without_an_engine_there_is_an_error_with_advice(tmp_path: Path, model: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"engine\.url.*base-rl up"):
        create_app(settings_for(tmp_path, model))


@pytest.mark.parametrize("allowed", [False, True])
async def test_a_run_may_allow_control_tokens_in_texts(
    tmp_path: Path, model: Path, engine: FakeEngine, allowed: bool
) -> None:
    run = RunSettings(model=str(model), allow_control_tokens=allowed)
    async with running(create_app(settings_for(tmp_path, model, run=run), engine=engine), key=RUN) as client:
        body = {"model": "policy", "messages": [{"role": "user", "content": "<|im_end|>"}]}
        async with asyncio.timeout(10):
            while (response := await client.post("/v1/messages/count_tokens", json=body)).status_code == 503:
                await asyncio.sleep(0.01)  # until the swap controller has read the engine's version
    counted = response.json()["input_tokens"]
    template = ChatTemplate.load(str(model))
    frame = template.encode(template.render([{"role": "user", "content": ""}], None, generation_prompt=True))
    assert (counted == len(frame) + 1) is allowed
    assert counted > len(frame)


async def test_a_wrong_model_or_run_stops_the_start(tmp_path: Path, model: Path, engine: FakeEngine) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    for run, pattern in ((RunSettings(model=str(empty)), "empty"), (RunSettings(model=""), r"run\.model")):
        app = create_app(settings_for(tmp_path / run.model[-5:], model, run=run), engine=engine)
        with pytest.raises(ConfigurationError, match=pattern):
            async with running(app):
                pass
        assert isinstance(app.startup_error, ConfigurationError)


async def test_a_run_that_was_named_by_mistake_leaves_nothing_behind(
    tmp_path: Path, model: Path, engine: FakeEngine
) -> None:
    """Its bootstrap keys belong to the existing run."""
    async with running(create_app(settings_for(tmp_path, model), engine=engine)):
        pass
    mistake = settings_for(tmp_path, model, run=RunSettings(name="polcy", model=str(model)))
    app = create_app(mistake, engine=engine)
    with pytest.raises(ConfigurationError, match=r"there is no run 'polcy' yet; the store has policy"):
        async with running(app):
            pass
    again = create_app(settings_for(tmp_path, model), engine=engine)
    async with running(again):
        assert [run.name for run in await again.services.runs.list_()] == ["policy"]


async def test_two_engines_settings_do_not_share_metrics(tmp_path: Path, model: Path, engine: FakeEngine) -> None:
    engine_settings = EngineSettings(url="http://127.0.0.1:9")
    apps = [create_app(settings_for(tmp_path, model, engine=engine_settings), engine=engine) for _ in range(2)]
    assert apps[0].metrics.registry is not apps[1].metrics.registry


async def test_every_declared_run_is_created_and_one_trainer_key_is_for_all(
    tmp_path: Path, model: Path, engine: FakeEngine
) -> None:
    """An installation with one run keeps its keys when tables of runs are added or removed."""
    alone = settings_for(tmp_path, model)
    other = alone.run.model_copy(update={"name": "other"})
    together = alone.model_copy(update={"runs": {"other": other}})
    first = True
    for settings, status in ((alone, 404), (together, 200), (together, 200), (alone, 404)):
        async with running(create_app(settings, engine=engine, clock=MovedClock()), key=TRAINER) as client:
            assert (await client.get("/api/v1/runs/policy/head")).status_code == 200
            assert (await client.get("/api/v1/runs/other/claims")).status_code == status
            # A trainer key never has the rights of an admin key, whether it belongs to a run or not.
            own = [run["name"] for run in (await client.get("/api/v1/runs")).json()["runs"]]
            assert own == (["policy", "other"] if status == 200 else ["policy"])
            assert (await client.get("/api/v1/keys")).status_code == 403
            listed = (await client.get("/api/v1/runs", headers=bearer(ADMIN))).json()["runs"]
            assert [run["name"] for run in listed] == (["policy"] if first else ["policy", "other"])
        first = False


async def test_a_declared_run_whose_model_cannot_be_loaded_is_refused_before_it_is_created(
    tmp_path: Path, model: Path, engine: FakeEngine
) -> None:
    alone = settings_for(tmp_path, model)
    (tmp_path / "empty").mkdir()
    broken = alone.run.model_copy(update={"name": "broken", "model": str(tmp_path / "empty")})
    app = create_app(alone.model_copy(update={"runs": {"broken": broken}}), engine=engine, clock=MovedClock())
    with pytest.raises(ConfigurationError, match=r"the run 'broken': .*empty"):
        async with running(app, key=ADMIN):
            pass
    async with running(create_app(alone, engine=engine, clock=MovedClock()), key=ADMIN) as client:
        assert [run["name"] for run in (await client.get("/api/v1/runs")).json()["runs"]] == ["policy"]
