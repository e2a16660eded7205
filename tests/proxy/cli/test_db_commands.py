from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, create_engine, make_url, text
from sqlalchemy.pool import NullPool
from typer.testing import CliRunner

from benchmarks.postgresql import programs as postgresql_programs
from proxy.auth.service import Credentials
from proxy.claims.service import ClaimService
from proxy.cli.commands import app
from proxy.contract.claim import ClaimRequest
from proxy.contract.identifiers import ClaimId
from proxy.database.migrate import current, downgrade, newest
from proxy.database.tables import SessionRow
from proxy.retention.erasing import EraseService
from proxy.retention.repository import ErasedReason
from proxy.sessions.opening import SessionSpec
from tests.database import sqlite_database
from tests.proxy.store import Store, open_store
from tests.proxy.turns.world import World, open_world
from tests.proxy.versions.publishing import commit_request, publish, versions_of

DRIVERS = {"sqlite": "sqlite", "postgresql": "postgresql+psycopg"}


@pytest.fixture
def run(database_url: str, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Run `base-rl db …` on the test's database."""
    monkeypatch.setenv("BASE_RL_DATABASE__URL", database_url)
    programs = postgresql_programs()
    if programs is not None:
        monkeypatch.setenv("PATH", str(programs), prepend=":")
    return lambda *arguments: CliRunner().invoke(app, ["db", *(str(argument) for argument in arguments)])


def execute(url: str, *statements: str) -> None:
    made = make_url(url)
    engine = create_engine(made.set(drivername=DRIVERS[made.get_backend_name()]), poolclass=NullPool)
    with engine.begin() as connection:
        for statement in statements:
            connection.execute(text(statement))


def a_trained_store(url: str) -> None:
    """A store in which one session is ready, one open and one leased."""

    async def fill() -> None:
        async with open_world(url) as world:
            await world.ready()
            await world.turn(await world.session())
            await leased(world)

    asyncio.run(fill())


async def leased(world: World) -> ClaimId:
    claims = ClaimService(database=world.database, clock=world.clock, signals=world.signals)
    batch = await claims.claim(world.run, ClaimRequest(trainer="t", want=1, at_least=1, max_staleness=1))
    assert batch.claim_id is not None
    return batch.claim_id


def test_a_store_that_is_whole(run: Callable[..., Any], database_url: str) -> None:
    a_trained_store(database_url)
    checked = run("check")
    assert (checked.exit_code, "whole" in checked.stdout) == (0, True), checked.output
    assert json.loads(run("check", "--json").stdout) == []


@pytest.mark.parametrize(
    ("damage", "found"),
    [
        ("UPDATE sessions SET turn_count = turn_count + 1", "turn counts"),
        ("UPDATE claims SET state = 'expired'", "leased"),
        ("UPDATE sessions SET training = 'consumed' WHERE training = 'leased'", "consumed once"),
        ("UPDATE claims SET state = 'committed', committed_version = 9", "committed"),
        ("UPDATE claimed_sessions SET session_id = 'ses_gone'", "lineage"),
        ("UPDATE turns SET output_logprobs = conversation_hash", "arrays"),
        ("UPDATE turns SET prefix_tokens = 7", "arrays"),
        ("UPDATE turns SET conversation_hash = substring(conversation_hash, 1, 0)", "arrays"),
        ("UPDATE sessions SET erased_at = 1, emptied_at = 2", "erasure"),
        ("UPDATE alembic_version SET version_num = '0001'", "revision"),
    ],
)
def test_inconsistencies_are_found(run: Callable[..., Any], database_url: str, damage: str, found: str) -> None:
    a_trained_store(database_url)
    execute(database_url, damage)
    checked = run("check", "--json")
    assert checked.exit_code == 1
    findings = {finding["name"]: finding for finding in json.loads(checked.stdout)}
    assert found in findings
    assert findings[found]["count"] >= 1
    assert found in run("check").stdout


def test_erasure_is_not_damage(run: Callable[..., Any], database_url: str, tmp_path: Path) -> None:
    """Four sessions are erased: one open, one ready, one leased, one trained."""

    async def erase_all() -> None:
        async with open_world(database_url) as world:
            await world.turn(await world.session(), prompt_ids=range(100))
            await world.ready()
            versions = versions_of(world)
            await versions.commit(world.run, commit_request([await leased(world)], 0, publish(tmp_path)))
            await world.ready(version=1)
            await leased(world)
            await world.ready()
            sessions = [row.id for row in await world.rows(SessionRow)]
            credentials = Credentials(world.database, b"s" * 32, world.clock)
            eraser = EraseService(world.database, world.runs, credentials, world.signals, world.clock)
            for session in sessions:
                await eraser.mark([session], ErasedReason.RETENTION, by="retention")
            assert run("check").exit_code == 0, "marked, and not yet emptied"
            assert await eraser.empty() == len(sessions) == 4

    asyncio.run(erase_all())
    checked = run("check")
    assert (checked.exit_code, "whole" in checked.stdout) == (0, True), checked.output


def test_an_old_store_is_upgraded(run: Callable[..., Any], database_url: str) -> None:

    downgrade(database_url, "0001")
    upgraded = run("upgrade")
    assert upgraded.exit_code == 0, upgraded.output
    assert current(database_url) == newest()


def test_a_backup_of_a_store_in_use_is_whole_and_never_overwrites(
    run: Callable[..., Any], database_url: str, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    in_use(database_url, lambda store: backed_up_meanwhile(store, run, copy))
    assert [path.name for path in tmp_path.iterdir() if "unfinished" in path.name] == []
    before = copy.read_bytes()
    again = run("backup", copy)
    assert (again.exit_code, "never overwrites" in again.stderr) == (1, True)
    assert copy.read_bytes() == before
    if database_url.startswith("sqlite"):
        with sqlite3.connect(copy) as connection:
            assert connection.execute("SELECT count(*) FROM sessions").fetchone() == (1,)
        connection.close()


def in_use(url: str, work: Callable[[Store], Coroutine[Any, Any, None]]) -> None:
    async def use() -> None:
        async with open_store(url) as store:
            await work(store)

    asyncio.run(use())


async def backed_up_meanwhile(store: Store, run: Callable[..., Any], copy: Path) -> None:

    await store.sessions.create(store.run, SessionSpec())
    made: list[Any] = []

    def write(connection: Connection) -> None:
        connection.execute(text("UPDATE sessions SET task = 'not committed yet'"))
        made.append(run("backup", copy))

    await store.database.commit(write)
    assert made[0].exit_code == 0, made[0].output
    assert "checked" in made[0].stdout


def test_a_sqlite_backup_is_a_store(tmp_path: Path) -> None:

    a_trained_store(sqlite_database(tmp_path))
    (tmp_path / "restored").mkdir()
    restored = tmp_path / "restored" / "base-rl.sqlite3"
    url = str(tmp_path / "store.sqlite3")
    runner = CliRunner(env={"BASE_RL_DATABASE__URL": f"sqlite:///{url}"})
    assert runner.invoke(app, ["db", "backup", str(restored)]).exit_code == 0
    found = CliRunner().invoke(app, ["db", "check", "--data-dir", str(restored.parent)])
    assert found.exit_code == 0, found.output


def test_a_damaged_file_is_found_and_not_backed_up(tmp_path: Path) -> None:

    a_trained_store(sqlite_database(tmp_path))
    path = tmp_path / "store.sqlite3"
    content = bytearray(path.read_bytes())
    middle = len(content) // 2 // 4096 * 4096
    content[middle : middle + 65536] = b"\xff" * 65536
    path.write_bytes(content)
    runner = CliRunner(env={"BASE_RL_DATABASE__URL": f"sqlite:///{path}"})
    copied = runner.invoke(app, ["db", "backup", str(tmp_path / "copy")])
    assert (copied.exit_code, (tmp_path / "copy").exists()) == (1, False)
    assert "damaged" in copied.stderr
    assert runner.invoke(app, ["db", "check"]).exit_code == 1


def test_no_store_is_created_if_there_is_none(tmp_path: Path) -> None:
    for command in ("upgrade", "check"):
        found = CliRunner().invoke(app, ["db", command, "--data-dir", str(tmp_path)])
        assert (found.exit_code, "there is no store" in found.stderr) == (1, True)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_pg_dump_is_reported(
    run: Callable[..., Any], database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if database_url.startswith("sqlite"):
        pytest.skip("SQLite needs no program")
    monkeypatch.setenv("PATH", str(tmp_path))
    found = run("backup", tmp_path / "copy")
    assert (found.exit_code, "pg_dump is not on the PATH" in found.stderr) == (1, True)
