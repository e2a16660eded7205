"""An installation from before several runs, engines as rows, projects and limits: its store and its configuration go
on unchanged, and further runs can be declared beside its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import SecretStr

from proxy.app import create_app
from proxy.database import migrate
from proxy.settings import BootstrapSettings, DatabaseSettings, RunSettings, ServerSettings, Settings
from tests.fakes.engine import FakeEngine
from tests.proxy.tokens.models import write_model
from tests.running_app import bearer, running, until_ready

ONE_RUN = "0013"
"""The last revision of the store without engines, projects, limits of keys and several runs on one trainer key."""
ADMIN, RUN, TRAINER = "rl-admin-of-before", "rl-run-of-before", "rl-trainer-of-before"
ASKED = {"model": "policy", "messages": [{"role": "user", "content": "Hello"}]}


def settings(directory: Path, url: str, **more: Any) -> Settings:
    """The configuration of before: one run and the configured keys."""
    return Settings(
        server=ServerSettings(data_dir=directory / "data"),
        database=DatabaseSettings(url=url),
        bootstrap=BootstrapSettings(
            admin_key=SecretStr(ADMIN), run_key=SecretStr(RUN), trainer_key=SecretStr(TRAINER)
        ),
        run=RunSettings(name="policy", model=str(directory / "model")),
        **more,
    )


def engine(directory: Path) -> FakeEngine:
    return FakeEngine(lambda _request: [5, 6, 2], model_path=str(directory / "model"), label="default")


async def seen(client: httpx.AsyncClient, session: str) -> dict[str, Any]:
    """Return what must not change: ids, sessions with rewards, versions, and the keys."""
    run = (await client.get("/api/v1/runs/policy", headers=bearer(ADMIN))).json()
    versions = (await client.get("/api/v1/runs/policy/versions", headers=bearer(TRAINER))).json()["versions"]
    keys = [(await client.get("/api/v1/keys/self", headers=bearer(key))).json() for key in (ADMIN, RUN)]
    return {
        "run": {name: run[name] for name in ("id", "state", "base_model", "head_version", "serving_version")},
        "session": (await client.get(f"/v1/sessions/{session}", headers=bearer(RUN))).json(),
        "versions": [version["version"] for version in versions],
        "keys": [(key["id"], key["kind"], key["run_id"]) for key in keys],
    }


@pytest.mark.timeout(120)
async def test_a_store_and_a_configuration_with_one_run_go_on(empty_database_url: str, tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    async with running(create_app(settings(tmp_path, empty_database_url), engine=engine(tmp_path))) as client:
        await until_ready(client)
        called = await client.post("/v1/chat/completions", headers=bearer(RUN), json=ASKED)
        session = called.headers["x-base-rl-session"]
        opened = (await client.post("/v1/sessions", headers=bearer(RUN), json={})).json()
        reward = await client.post("/v1/feedback", headers=bearer(RUN), json={"reward": 1.0, "session_id": session})
        assert reward.status_code == 201, reward.text
        before = await seen(client, session)
    migrate.downgrade(empty_database_url, ONE_RUN)
    assert migrate.current(empty_database_url) == ONE_RUN

    async with running(create_app(settings(tmp_path, empty_database_url), engine=engine(tmp_path))) as client:
        await until_ready(client)
        assert await seen(client, session) == before
        for key in (RUN, opened["api_key"]):
            answered = await client.post("/v1/chat/completions", headers=bearer(key), json=ASKED)
            assert answered.status_code == 200, answered.text
        run = (await client.get("/api/v1/runs/policy", headers=bearer(ADMIN))).json()
        assert (run["project"], run["begun_from"]) == ("default", None)
        assert (await client.get("/api/v1/limits", headers=bearer(ADMIN))).json() == {"limits": []}
        (found,) = (await client.get("/api/v1/engines", headers=bearer(ADMIN))).json()["engines"]
        assert (found["name"], found["state"]) == ("engine", "ready")

    more = {"runs": {"second": RunSettings(name="second", model=str(tmp_path / "model"))}}
    async with running(create_app(settings(tmp_path, empty_database_url, **more), engine=engine(tmp_path))) as client:
        await until_ready(client)
        now = await seen(client, session)
        assert now == before
        listed = (await client.get("/api/v1/runs", headers=bearer(ADMIN))).json()["runs"]
        assert {one["name"] for one in listed} == {"policy", "second"}
        assert (await client.post("/v1/chat/completions", headers=bearer(RUN), json=ASKED)).status_code == 200
        for name in ("policy", "second"):
            head = await client.get(f"/api/v1/runs/{name}/head", headers=bearer(TRAINER))
            assert head.status_code == 200, "the configured trainer key is for every run now"
