"""`base-rl rewards …` with a real server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from proxy.auth.service import PrincipalKind
from proxy.cli.commands import app
from proxy.feedback import endpoints as feedback_endpoints
from proxy.feedback.service import FeedbackService
from proxy.http.routes import add_routes
from proxy.http.services import provide
from proxy.overview.filters import SessionFilter
from tests.database import sqlite_database
from tests.fakes.run_history import NOW, add_history, add_run, add_session
from tests.proxy.overview.serving import serving
from tests.proxy.overview.site import Site, open_site


class Shell:
    """Runs `base-rl rewards` with a key of the run `calculator`."""

    def __init__(self, site: Site, address: str, key: str, run_id: str) -> None:
        self.site = site
        self.run_id = run_id
        self._options = ["--url", address, "--api-key", key]

    async def run(self, *arguments: str, status: int = 0) -> str:
        runner = CliRunner(env={"COLUMNS": "300"})
        result = await asyncio.to_thread(runner.invoke, app, ["rewards", *arguments, *self._options])
        assert result.exit_code == status, result.output
        return result.output

    async def json(self, *arguments: str) -> Any:
        return json.loads(await self.run(*arguments, "--json"))

    async def trained(self) -> str:
        """Return a session that was trained on a reward of 1."""
        wanted = SessionFilter(training="consumed", min_reward=1.0)
        return (await self.site.overview.sessions(self.run_id, wanted, limit=1)).sessions[0].id


@pytest.fixture
async def shell(tmp_path: Path) -> AsyncIterator[Shell]:
    async with open_site(sqlite_database(tmp_path), tmp_path, clock=lambda: NOW) as site:
        run_id = await add_run(site.database, now=NOW - 200)
        await add_history(site.database, run_id, steps=2, per_step=8)
        provide(site.app, FeedbackService(site.database, site.signals, lambda: NOW + 60))
        add_routes(site.app, feedback_endpoints.router)
        key = await site.credentials.create(PrincipalKind.RUN, run_id=run_id)
        async with serving(site) as address:
            yield Shell(site, address, key.text, run_id)


async def test_a_reward_is_added_and_found(shell: Shell) -> None:
    session = await add_session(shell.site.database, shell.run_id, now=NOW, external_id="attempt-42")
    assert "is recorded" in await shell.run("add", "attempt-42", "-0.5", "--name", "style", "--comment", "[too] long")
    (entry,) = await shell.json("list", "--session", "attempt-42", "--run", "calculator")
    assert (entry["session_id"], entry["value"], entry["name"]) == (session, -0.5, "style")
    listed = await shell.run("list", "--name", "style")
    assert "−0.5" in listed
    assert "[too] long" in listed
    again = ("add", "attempt-42", "1", "--idempotency-key", "k", "--source", "ada")
    assert await shell.json(*again) == await shell.json(*again)
    assert [one["source"] for one in await shell.json("list", "--source", "ada")] == ["ada"]


async def test_a_correction_supersedes_and_shows_as_revised(shell: Shell) -> None:
    assert "still has the rewards" in await shell.run("revised", "calculator")
    session = await shell.trained()
    late = await shell.run("add", session, "0", "--source", "checker", "--comment", "it cheated")
    assert "after a trainer had taken its session" in late
    (one,) = await shell.json("revised", "calculator")
    assert (one["session_id"], one["reward_then"], one["reward_now"]) == (session, 1.0, 0.0)
    assert "reward 0 by checker" in await shell.run("revised", "calculator")
    entries = await shell.json("list", "--session", session)
    assert [(entry["value"], entry["superseded"]) for entry in entries] == [(0.0, False), (1.0, True)]
    assert [entry["value"] for entry in await shell.json("list", "--late")] == [0.0]
    assert {entry["after_training"] for entry in await shell.json("list", "--in-time")} == {False}
    assert len(await shell.json("list", "--since", "2026-09-21T14:14:00")) == 1


async def test_a_turn_is_rewarded_without_an_end(shell: Shell) -> None:
    session = await add_session(shell.site.database, shell.run_id, now=NOW, state="open", ended_at=None)
    (turn,) = (await shell.site.overview.session(session)).turns
    await shell.run("add", session, "1", "--turn", turn.id)
    assert [entry["turn_id"] for entry in await shell.json("list", "--turn", turn.id)] == [turn.id]
    assert (await shell.site.overview.session(session)).session.state == "open"
    await shell.run("add", session, "1", "--turn", turn.id, "--final")
    assert (await shell.site.overview.session(session)).session.state == "ended"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("add", "ses_none", "1"), "there is no session 'ses_none'"),
        (("add", "ses_none", "nan"), "finite"),
        (("list", "--turn", "turn_none"), "there is no turn"),
        (("revised", "other"), "there is no run 'other'"),
    ],
)
async def test_mistakes_are_answered(shell: Shell, arguments: tuple[str, ...], says: str) -> None:
    assert says in await shell.run(*arguments, status=1)
