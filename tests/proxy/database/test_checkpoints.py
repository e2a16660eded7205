"""SQLite's log is written back by a thread, beside those who write."""

from __future__ import annotations

import threading
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
    """With a table, whose log no commit writes back."""
    engine = create_engine(f"sqlite:///{path}", poolclass=NullPool, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        for statement in ("PRAGMA journal_mode = WAL", "PRAGMA wal_autocheckpoint = 0", "CREATE TABLE t (x TEXT)"):
            run_plain(connection, statement)
        yield connection


def add(connection: Connection, rows: int) -> None:
    """A page of SQLite's and more in each."""
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


def test_a_short_one_is_left(connection: Connection, path: Path) -> None:
    checkpoints = Checkpoints(str(path))
    before = path.stat().st_size
    for _ in range(3):
        add(connection, 10)
        checkpoints.committed(connection)
    checkpoints.close()
    assert path.stat().st_size == before


def checkpointing(threads_before: set[threading.Thread]) -> list[str]:
    return [each.name for each in set(threading.enumerate()) - threads_before if "checkpoints" in each.name]


async def test_a_store_that_is_written_has_it_until_it_is_closed(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    database = Database(sqlite_database(tmp_path))
    rows = [{"kind": "k", "data": "{}"}] * ENOUGH
    await database.transact(
        lambda connection: connection.execute(text("INSERT INTO events (kind, data) VALUES (:kind, :data)"), rows)
    )
    assert checkpointing(before) == ["store-checkpoints"]
    await database.aclose()
    assert checkpointing(before) == []
