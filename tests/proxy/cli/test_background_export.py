"""`base-rl export --in-background`, with a running proxy and jobs that run when the test says so."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import update
from typer.testing import CliRunner

from proxy.auth.service import PrincipalKind
from proxy.cli import background_export
from proxy.cli.commands import app as command_line
from proxy.database.tables import JobRow
from tests.database import sqlite_database
from tests.proxy.calls.world import listening
from tests.proxy.transfer.test_exporting import Exports, opened
from tests.proxy.transfer.test_service import recorded


class Site:
    """A running proxy with background exports; `run` runs `base-rl export policy` with it."""

    def __init__(self, exports: Exports, address: str, key: str) -> None:
        self.exports = exports
        self.place = (address, key)
        self.seen = asyncio.Event()

    async def run(self, *words: str, status: int = 0) -> str:
        address, key = self.place
        arguments = ["export", "policy", *words, "--url", address, "--api-key", key, "--format", "jsonl"]
        runner = CliRunner(env={"COLUMNS": "300"})
        result = await asyncio.to_thread(runner.invoke, command_line, arguments)
        assert result.exit_code == status, result.output
        return result.output

    async def asked(self) -> None:
        """Wait until the command has asked for the state of its export once more."""
        self.seen.clear()
        await self.seen.wait()


@pytest.fixture
async def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Site]:
    monkeypatch.setattr(background_export, "POLL_SECONDS", 0.01)
    async with opened(sqlite_database(tmp_path), tmp_path) as exports:
        await recorded(exports.world)
        key = await exports.store.credentials.create(PrincipalKind.ADMIN)
        async with listening(exports.app()) as address:
            found = Site(exports, address, key.text)
            show = exports.service.show

            async def showing(*arguments: Any) -> Any:
                view = await show(*arguments)
                found.seen.set()
                return view

            monkeypatch.setattr(exports.service, "show", showing)
            yield found


@asynccontextmanager
async def begun(site: Site, *words: str, status: int = 0) -> AsyncIterator[asyncio.Task[str]]:
    """Yield a command that waits for its export."""
    command = asyncio.create_task(site.run("--in-background", "june", *words, status=status))
    await site.asked()
    yield command
    await command


async def test_it_waits_for_the_file_through_a_failure(site: Site) -> None:
    site.exports.directory.write_text("not a directory")
    async with begun(site) as command:
        assert await site.exports.run_jobs() == ["failed"]
        await site.asked()
        site.exports.directory.unlink()
        site.exports.store.clock.now += 3600
        assert await site.exports.run_jobs() == ["done"]
    said = command.result()
    assert "export 'june' begun; `base-rl jobs show job_" in said
    assert "it failed and will be tried again: " in said
    assert said.count("tried again") == 1
    file = site.exports.directory / site.exports.store.run.id / "june.jsonl"
    assert f"1 sessions, {file.stat().st_size} bytes: {file}" in said


async def test_a_cancelled_export_is_an_error(site: Site) -> None:
    async with begun(site, status=1) as command:
        cancelled = update(JobRow).values(state="cancelled", error="nobody wants it")
        await site.exports.store.database.commit(lambda connection: connection.execute(cancelled))
    assert "the export is cancelled: nobody wants it; `base-rl jobs show job_" in command.result()


async def test_it_need_not_wait_and_its_name_is_given_once(site: Site) -> None:
    assert "begun" in await site.run("--in-background", "june", "--no-wait")
    again = await site.run("--in-background", "june", status=1)
    assert "the run has an export 'june' already: give another name" in again
    wrong = await site.run("--in-background", "../june", status=1)
    assert "name" in wrong


async def test_ctrl_c_leaves_the_job(site: Site) -> None:
    body = {"name": "june", "format": "jsonl"}
    export = background_export.export_in_background(*site.place, "policy", body, wait=True)
    waiting = asyncio.create_task(export)
    await site.asked()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert await site.exports.run_jobs() == ["done"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "name either a folder with --out, or an export with --in-background"),
        (("--out", "x", "--in-background", "june"), "name either a folder"),
        (("--in-background", "june", "--preferences"), "--preferences goes with --out"),
    ],
)
async def test_wrong_options_are_named(site: Site, words: tuple[str, ...], said: str) -> None:
    assert said in await site.run(*words, status=1)
