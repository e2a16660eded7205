"""Damage of a SQLite file: found at the start or by a call, and reported by every call from then on."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from proxy.database import integrity
from proxy.database.integrity import Integrity, IntegrityState
from proxy.database.unit_of_work import Database
from proxy.errors import StoreDamaged, StoreUnavailable
from proxy.runs.service import RunDirectory
from tests.database import sqlite_database, sqlite_url
from tests.proxy.store import MovedClock
from tests.proxy.turns.world import open_world

SESSIONS = 60


def filled(directory: Path) -> Path:
    """Create a store with some sessions and an empty log."""
    url = sqlite_database(directory)

    async def fill() -> None:
        async with open_world(url) as world:
            for _ in range(SESSIONS):
                await world.ready()

    asyncio.run(fill())
    path = directory / "store.sqlite3"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    return path


def pages_of(path: Path, table: str) -> list[int]:
    with closing(sqlite3.connect(path)) as connection:
        return [row[0] for row in connection.execute("SELECT pageno FROM dbstat WHERE name = ?", (table,))]


def page_count(path: Path) -> tuple[int, int]:
    with closing(sqlite3.connect(path)) as connection:
        (size,), (count,) = (connection.execute(f"PRAGMA {name}").fetchone() for name in ("page_size", "page_count"))
    return size, count


def overwrite(path: Path, page: int, byte: bytes = b"\xff") -> None:
    """`page` counts from 1."""
    size, _ = page_count(path)
    with path.open("r+b") as file:
        file.seek((page - 1) * size)
        file.write(byte * size)


@pytest.mark.parametrize("byte", [b"\xff", b"\0"])
def test_an_overwritten_page_is_found_at_the_start(tmp_path: Path, byte: bytes) -> None:
    path = filled(tmp_path)
    whole = path.read_bytes()
    _, count = page_count(path)
    assert count > 40
    for page in range(1, count + 1):
        path.write_bytes(whole)
        overwrite(path, page, byte)
        found = Integrity(str(path))
        found.begin()
        found.wait(30)
        assert found.state is IntegrityState.DAMAGED, page
        with pytest.raises(StoreDamaged, match="restore the store from a backup") as raised:
            found.raise_if_damaged()
        assert raised.value.retry_after is None
        found.close()


async def test_an_undamaged_store_passes_the_check(tmp_path: Path) -> None:
    database = Database(sqlite_database(tmp_path))
    await database.check_integrity(patience_seconds=30)
    assert database.integrity is IntegrityState.OK
    await database.aclose()


async def test_a_large_store_is_checked_in_the_background_and_stopping_does_not_wait_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(integrity, "STOP_TEST_STEPS", 1)
    path = tmp_path / "store.sqlite3"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE t (x TEXT)")
        connection.execute(
            "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 300000)"
            " INSERT INTO t SELECT hex(i) FROM n"
        )
        connection.commit()
    database = Database(sqlite_url(tmp_path))
    await database.check_integrity(patience_seconds=0)
    states = [database.integrity]
    await database.aclose()
    states.append(database.integrity)
    assert states == [IntegrityState.CHECKING, IntegrityState.UNCHECKED], "stopped before its end"


def test_after_a_call_finds_damage_every_call_reports_it(tmp_path: Path) -> None:
    """Also calls that would find nothing: a run that exists must not become a 404."""
    path = filled(tmp_path)
    for page in pages_of(path, "turns")[1:]:
        overwrite(path, page)

    async def meet() -> None:
        database = Database(sqlite_url(tmp_path))
        runs = RunDirectory(database, MovedClock())
        assert (await runs.by_name("policy")).name == "policy", "what is whole is still read"
        with pytest.raises(StoreDamaged, match="malformed"):
            await database.read(
                lambda connection: connection.exec_driver_sql("SELECT max(messages) FROM turns").all()
            )
        assert database.integrity is IntegrityState.DAMAGED
        with pytest.raises(StoreDamaged):
            await runs.by_name("no such run")
        with pytest.raises(StoreDamaged):
            await database.check_writable()
        with pytest.raises(StoreDamaged):
            await database.commit(lambda connection: None)
        with pytest.raises(StoreDamaged):
            await database.scrub()
        await database.aclose()

    asyncio.run(meet())


def test_a_locked_store_does_not_count_as_damaged(tmp_path: Path) -> None:
    """A lock is temporary, so callers get the error that asks them to retry."""
    path = filled(tmp_path)

    async def meet() -> None:
        database = Database(sqlite_url(tmp_path), busy_timeout_seconds=0.1)
        with closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            with pytest.raises(StoreUnavailable, match="locked") as raised:
                await database.commit(lambda connection: None)
        assert not isinstance(raised.value, StoreDamaged)
        assert raised.value.retry_after is not None
        await database.commit(lambda connection: None)
        await database.aclose()

    asyncio.run(meet())
