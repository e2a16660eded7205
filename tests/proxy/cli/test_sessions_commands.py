"""`base-rl sessions …` with a real server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import update
from typer.testing import CliRunner

from proxy.auth.service import PrincipalKind
from proxy.cli.commands import app
from proxy.database.tables import TurnRow
from proxy.http.routes import add_routes
from proxy.http.services import provide
from proxy.runs.service import RunDirectory
from proxy.sessions import endpoints as session_endpoints
from proxy.sessions.service import SessionService
from tests.database import sqlite_database
from tests.fakes.run_history import NOW, add_history, add_run, add_session
from tests.proxy.overview.serving import serving
from tests.proxy.overview.site import Site, open_site


class Shell:
    """Runs `base-rl sessions` with an admin key, or with the key of the run `calculator`."""

    def __init__(self, site: Site, address: str, run_id: str, keys: dict[PrincipalKind, str]) -> None:
        self.site = site
        self.run_id = run_id
        self._address = address
        self._keys = keys

    async def run(self, *arguments: str, status: int = 0, kind: PrincipalKind = PrincipalKind.ADMIN) -> str:
        addressed = ["sessions", *arguments, "--url", self._address, "--api-key", self._keys[kind]]
        runner = CliRunner(env={"COLUMNS": "400"})
        result = await asyncio.to_thread(runner.invoke, app, addressed)
        assert result.exit_code == status, result.output
        return result.output

    async def json(self, *arguments: str, kind: PrincipalKind = PrincipalKind.ADMIN) -> Any:
        return json.loads(await self.run(*arguments, "--json", kind=kind))

    async def attempts(self, count: int) -> list[str]:
        """Create sessions of the name `attempt-42`, rewarded 0, 1, 2 and so on."""
        return [
            await add_session(
                self.site.database,
                self.run_id,
                now=NOW - at,  # as if the clock had been set back between them
                reward=float(at),
                external_id="attempt-42",
                attempt=at + 1,
                attributed_by="path",
            )
            for at in range(count)
        ]


@pytest.fixture
async def shell(tmp_path: Path) -> AsyncIterator[Shell]:
    async with open_site(sqlite_database(tmp_path), tmp_path, clock=lambda: NOW) as site:
        run_id = await add_run(site.database, now=NOW - 200)
        runs = RunDirectory(site.database, lambda: NOW)
        provide(site.app, SessionService(site.database, runs, site.credentials, site.signals, lambda: NOW))
        add_routes(site.app, session_endpoints.router)
        keys = {
            PrincipalKind.ADMIN: (await site.credentials.create(PrincipalKind.ADMIN)).text,
            PrincipalKind.RUN: (await site.credentials.create(PrincipalKind.RUN, run_id=run_id)).text,
        }
        async with serving(site) as address:
            yield Shell(site, address, run_id, keys)


async def test_a_list_tells_of_each_session_what_became_of_it_and_why(shell: Shell) -> None:
    assert "no sessions yet" in await shell.run("list")
    rewarded = (await shell.attempts(2))[1]
    failed = await add_session(
        shell.site.database, shell.run_id, now=NOW, state="ended", outcome="failed", end_reason="explicit"
    )
    await add_session(shell.site.database, shell.run_id, now=NOW, state="open", external_id="[red]x[/]")
    lines = [line.split() for line in (await shell.run("list")).splitlines() if line]
    listed = {words[0]: " ".join(words) for words in lines}
    assert listed[rewarded].startswith(f"{rewarded} attempt-42 #2 1 1 path ended")
    assert listed[failed].startswith(f"{failed} 1 – created failed")
    for session, state in ((rewarded, "ready"), (failed, "pending")):
        number = listed[session].rpartition(f"{state} ")[2]
        view = await shell.json("show", session)
        assert listed[number] == f"{number} {view['explanation']}"
    assert "[red]x[/]" in await shell.run("list", "--state", "open"), "a name is text and no markup"
    for kind in (PrincipalKind.ADMIN, PrincipalKind.RUN):
        (first, second) = await shell.json("list", "--name", "attempt-42", kind=kind)
        assert ((first["attempt"], first["reward"]), second["attempt"]) == ((1, 0.0), 2)
    assert await shell.run("list", "--name", "other") == "no such session\n"


async def test_every_filter_is_the_apis(shell: Shell) -> None:
    await add_history(shell.site.database, shell.run_id, steps=2, per_step=8)
    await shell.attempts(3)
    for arguments, count in (
        (("--state", "open"), 2),
        (("--training", "expired"), 1),
        (("--group", "task-0"), 8),
        (("--attributed-by", "path"), 3),
        (("--attributed-by", "path", "--min-reward", "1", "--max-reward", "1"), 1),
        (("--run", "calculator", "--name", "attempt-42", "--limit", "2"), 2),
    ):
        assert len(await shell.json("list", *arguments)) == count, arguments


async def test_pages_are_followed_up_to_the_limit(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page of a filtered list may be short, or empty, before the last one."""
    await add_history(shell.site.database, shell.run_id, steps=2, per_step=8)
    whole = [one["id"] for one in await shell.json("list")]
    assert len(whole) == 26
    monkeypatch.setattr("proxy.cli.operations._PAGE", 4)
    monkeypatch.setattr("proxy.overview.sessions.repository.SEARCHED", 3)
    assert [one["id"] for one in await shell.json("list")] == whole
    assert [one["id"] for one in await shell.json("list", "--limit", "10")] == whole[:10]
    assert len(await shell.json("list", "--training", "consumed")) == 16
    assert "raise --limit, now 10" in await shell.run("list", "--limit", "10")
    assert "raise --limit" not in await shell.run("list", "--limit", "27")


async def test_a_session_is_shown_by_id_and_by_name(shell: Shell) -> None:
    first, second = await shell.attempts(2)
    (turn,) = (await shell.site.overview.session(second)).turns
    await shell.site.database.commit(
        lambda connection: connection.execute(
            update(TurnRow).where(TurnRow.id == turn.id).values(state="truncated", continuation="edited")
        )
    )
    shown = await shell.run("show", "attempt-42")
    abandoned = f"turn {turn.ordinal} is not trained: it was abandoned: the agent left"
    for said in ("attempt-42 #2", turn.id, "truncated", abandoned, "edited", "Named by the address", first):
        assert said in shown
    view = await shell.json("show", second)
    assert view["explanation"] in shown
    assert (view["id"], view["rewards"][0]["value"]) == (second, 1.0)
    assert (await shell.json("show", "attempt-42", "--run", "calculator"))["id"] == second
    assert (await shell.json("show", "attempt-42", kind=PrincipalKind.RUN))["id"] == second
    assert (await shell.json("show", first))["id"] == first


async def test_one_of_several_runs_must_be_named(shell: Shell) -> None:
    (session,) = await shell.attempts(1)
    await add_run(shell.site.database, name="other")
    for arguments in (("list",), ("show", "attempt-42")):
        assert "there are several runs: calculator, other; say which with --run" in await shell.run(
            *arguments, status=1
        )
    assert (await shell.json("show", session))["run"] == "calculator"
    assert [one["id"] for one in await shell.json("list", "--run", "calculator")] == [session]


@pytest.mark.parametrize(
    ("arguments", "says", "status"),
    [
        (("show", "nobody"), "the run 'calculator' has no session named 'nobody'", 1),
        (("show", "ses_" + "0" * 26), "there is no session", 1),
        (("list", "--run", "other"), "there is no run 'other'", 1),
        (("list", "--training", "gone"), "Invalid value for '--training'", 2),
        (("list", "--attributed-by", "magic"), "conversation", 2),
        (("list", "--min-reward", "nan"), "min_reward", 1),
    ],
)
async def test_mistakes_are_answered(shell: Shell, arguments: tuple[str, ...], says: str, status: int) -> None:
    assert says in await shell.run(*arguments, status=status)
