"""The API of judges and its commands, with a real server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI
from typer.testing import CliRunner

from proxy.auth.service import PrincipalKind
from proxy.cli.commands import app as command_line
from proxy.http import errors
from proxy.http.routes import add_routes
from proxy.http.services import provide
from proxy.judges import endpoints
from tests.database import sqlite_database
from tests.proxy.judges.model_server import grade, refusal
from tests.proxy.judges.world import World, open_world
from tests.proxy.overview.serving import serving_app
from tests.running_app import bearer


@asynccontextmanager
async def open_api(world: World) -> AsyncIterator[str]:
    app = FastAPI()
    provide(app, world.store.runs, world.store.credentials, world.judges, world.trials)
    errors.install(app)
    add_routes(app, endpoints.router)
    async with serving_app(app) as address:
        yield address


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    async with open_world(sqlite_database(tmp_path)) as opened:
        yield opened


async def test_who_may_list_and_who_may_spend(world: World) -> None:
    session_id = await world.session()
    keys = {
        kind: (await world.store.credentials.create(kind, run_id=run_id)).text
        for kind, run_id in ((PrincipalKind.ADMIN, None), (PrincipalKind.RUN, world.store.run.id))
    }
    async with open_api(world) as address, httpx.AsyncClient(base_url=address) as http:
        for kind, status in ((PrincipalKind.RUN, 403), (PrincipalKind.ADMIN, 202)):
            headers = bearer(keys[kind])
            listed = await http.get("/api/v1/runs/policy/judges", headers=headers)
            assert [judge["name"] for judge in listed.json()["judges"]] == ["taste"]
            path = "/api/v1/runs/policy/judges/taste/rejudge"
            asked = await http.post(path, headers=headers, json={"sessions": [session_id]})
            assert asked.status_code == status
        assert asked.json() == {"enqueued": 1, "more": False}
        for body, name, status in (({"sessions": []}, "taste", 400), ({"all": 1}, "taste", 400), ({}, "other", 404)):
            reply = await http.post(f"/api/v1/runs/policy/judges/{name}/rejudge", headers=headers, json=body)
            assert reply.status_code == status, reply.text
            assert reply.json()["error"]["message"]


async def test_the_commands_show_scores_and_the_newest_problem(world: World) -> None:
    await world.session()
    await world.run_jobs()
    await world.configure(model="local/unknown")
    key = (await world.store.credentials.create(PrincipalKind.ADMIN, run_id=None)).text
    async with open_api(world) as address:

        async def shell(*arguments: str) -> str:
            options = ["--url", address, "--api-key", key]
            runner = CliRunner(env={"COLUMNS": "300"})
            result = await asyncio.to_thread(runner.invoke, command_line, [*arguments, *options])
            assert result.exit_code == 0, result.output
            return result.output

        assert "sessions that will be judged: 1" in await shell("rewards", "rejudge", "policy", "taste")
        world.model.answers = [refusal(404, "no such model")]
        assert await world.run_jobs() == ["dead"]
        shown = await shell("judges", "list", "policy")
        header, row = (line.split() for line in shown.splitlines()[:2])
        figures = dict(zip(header, row, strict=False))  # the first ones: some of the later cells are empty
        assert figures["model"] == "local/unknown"
        assert [figures[name] for name in ("scored", "compared", "failed")] == ["1", "0", "1"]
        assert "answered 404 for 'unknown': no such model" in shown


async def test_a_trial_shows_scores_and_records_nothing(world: World) -> None:
    first, second = await world.session(), await world.session()
    await world.run_jobs()
    world.model.answers = [grade(0.25, "half right"), "no idea"]
    key = (await world.store.credentials.create(PrincipalKind.ADMIN)).text
    async with open_api(world) as address:
        shown = await _command(
            "judges", "try", "policy", "taste", "--sessions", f"{first},{second}", url=address, key=key
        )
        assert ("0.25" in shown, "220 tokens" in shown, "valid" in shown) == (True, True, True)
        missing = await _command(
            "judges", "try", "policy", "taste", "--sessions", "ses_none", url=address, key=key, status=1
        )
        assert "no such session" in missing
        refused = await _command("judges", "secret", "policy", "taste", url=address, key=key, status=1)
        assert "no verifier" in refused
    assert len(await world.rewards()) == len(await world.judgements()) == 2


async def _command(*words: str, url: str, key: str, status: int = 0) -> str:
    options = ["--url", url, "--api-key", key]
    result = await asyncio.to_thread(CliRunner(env={"COLUMNS": "200"}).invoke, command_line, [*words, *options])
    assert result.exit_code == status, result.output
    return result.output
