"""Checkpoints: a thread writes SQLite's log back while others write."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import Connection, create_engine, text
from sqlalchemy.pool import NullPool

from proxy.database.checkpoints import Checkpoints
from proxy.database.prepared import run_plain
from proxy.database.unit_of_work import Database
from tests.database import sqlite_database

ENOUGH = 300


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store.sqlite3"


@pytest.fixture
def connection(path: Path) -> Iterator[Connection]:
    """Open a store with one table, whose commits make no checkpoints."""
    engine = create_engine(f"sqlite:///{path}", poolclass=NullPool, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        for statement in ("PRAGMA journal_mode = WAL", "PRAGMA wal_autocheckpoint = 0", "CREATE TABLE t (x TEXT)"):
            run_plain(connection, statement)
        yield connection


def add(connection: Connection, rows: int) -> None:
    """Commit rows that fill more than a page each."""
    run_plain(connection, "BEGIN IMMEDIATE")
    for _ in range(rows):
        run_plain(connection, "INSERT INTO t VALUES (hex(randomblob(4096)))")
    run_plain(connection, "COMMIT")


def test_a_long_log_is_written_back_while_somebody_writes(connection: Connection, path: Path) -> None:
    checkpoints = Checkpoints(str(path))
    before = path.stat().st_size
    add(connection, ENOUGH)
    run_plain(connection, "BEGIN IMMEDIATE")
    run_plain(connection, "INSERT INTO t VALUES ('more')")
    checkpoints.committed(connection)
    checkpoints.close()
    assert path.stat().st_size > before + ENOUGH * 4096
    run_plain(connection, "COMMIT")
    assert connection.execute(text("SELECT count(*) FROM t")).scalar_one() == ENOUGH + 1


def test_a_short_log_is_not_emptied(connection: Connection, path: Path) -> None:
    checkpoints = Checkpoints(str(path))
    before = path.stat().st_size
    for _ in range(3):
        add(connection, 10)
        checkpoints.committed(connection)
    checkpoints.close()
    assert path.stat().st_size == before


def test_a_log_is_emptied_even_if_readers_always_overlap(connection: Connection, path: Path) -> None:
    """Each reader starts before the previous one ends, so SQLite itself never restarts the log."""
    checkpoints = Checkpoints(str(path), long_log=100)
    log = path.with_name(path.name + "-wal")

    def reader() -> sqlite3.Connection:
        opened = sqlite3.connect(path, isolation_level=None)
        opened.execute("BEGIN")
        opened.execute("SELECT count(*) FROM t").fetchone()
        return opened

    current = reader()
    for _ in range(8):
        add(connection, ENOUGH)
        following = reader()
        current.close()
        current = following
    assert log.stat().st_size > 8 * ENOUGH * 4096
    checkpoints.committed(connection)
    deadline = time.monotonic() + 20
    while log.stat().st_size and time.monotonic() < deadline:  # there is a reader at every moment
        following = reader()
        current.close()
        current = following
    checkpoints.close()
    current.close()
    assert log.stat().st_size == 0
    assert connection.execute(text("SELECT count(*) FROM t")).scalar_one() == 8 * ENOUGH


async def test_a_long_log_is_truncated_when_it_restarts(tmp_path: Path) -> None:
    database = Database(sqlite_database(tmp_path))
    limit = await database.read(lambda found: found.exec_driver_sql("PRAGMA journal_size_limit").scalar_one())
    assert limit == 64 << 20
    await database.aclose()


def checkpointing(threads_before: set[threading.Thread]) -> list[str]:
    return [each.name for each in set(threading.enumerate()) - threads_before if "checkpoints" in each.name]


async def test_a_store_has_a_checkpoint_thread_until_it_is_closed(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    database = Database(sqlite_database(tmp_path))
    rows = [{"kind": "k", "data": "{}"}] * ENOUGH
    await database.commit(
        lambda connection: connection.execute(text("INSERT INTO events (kind, data) VALUES (:kind, :data)"), rows)
    )
    assert checkpointing(before) == ["store-checkpoints"]
    await database.aclose()
    assert checkpointing(before) == []
