"""Empty, durable databases of SQLite and PostgreSQL, and their sizes."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.postgresql import DURABLE, PostgresServer

SQLITE, POSTGRESQL = "sqlite", "postgresql"
NAMES = (SQLITE, POSTGRESQL)


@dataclass(frozen=True)
class Place:
    """A database, and its size in bytes with tables and indexes once everything is written."""

    url: str
    size: Callable[[], int]


@contextmanager
def place(name: str, directory: Path) -> Iterator[Callable[[], Place]]:
    """Makes new databases of one kind."""
    if name == SQLITE:
        numbers = iter(range(1 << 30))
        yield lambda: _sqlite(directory / f"store-{next(numbers)}.sqlite3")
        return
    server = PostgresServer(DURABLE, directory)
    server.start()
    try:
        numbers = iter(range(1 << 30))
        yield lambda: _postgresql(server, f"store_{next(numbers)}")
    finally:
        server.remove()


def _sqlite(path: Path) -> Place:
    def size() -> int:
        with closing(sqlite3.connect(path)) as connection:
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            pages, free, bytes_ = (
                connection.execute(f"PRAGMA {name}").fetchone()[0]
                for name in ("page_count", "freelist_count", "page_size")
            )
            return int((pages - free) * bytes_)

    return Place(f"sqlite:///{path}", size)


def _postgresql(server: PostgresServer, name: str) -> Place:
    server.make_database(name)

    def size() -> int:
        with server.connect(name) as connection:
            connection.execute("VACUUM")
            row = connection.execute("SELECT pg_database_size(current_database())").fetchone()
            assert row is not None
            return int(str(row[0])) - empty

    empty = 0
    empty = size()
    return Place(server.url(name), size)
