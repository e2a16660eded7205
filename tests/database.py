"""Databases for tests: a SQLite file, or a database of a PostgreSQL server that lives as long as the test process.

The server is made where PostgreSQL's programs are found, with initdb, in a directory of its own and reached by a
socket there; BASE_RL_REQUIRE_POSTGRES=1 makes their absence a failure. Every test gets a database copied from one
that was migrated once.
"""

from __future__ import annotations

import functools
import itertools
import os
import resource
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

import benchmarks.postgresql
from benchmarks.postgresql import FORGETFUL, programs
from proxy.database.migrate import upgrade
from proxy.lifecycle.check import check

_MIGRATED = "migrated"


needs_postgresql = pytest.mark.skipif(
    programs() is None and os.environ.get("BASE_RL_REQUIRE_POSTGRES") != "1",
    reason="no PostgreSQL server is installed (apt-get install postgresql)",
)


class PostgresServer(benchmarks.postgresql.PostgresServer):
    """A temporary server with numbered databases. Its commits do not wait for the disk."""

    def __init__(self) -> None:
        super().__init__(FORGETFUL)
        self._numbers = itertools.count()
        self._template: str | None = None

    def new_database(self, *, migrated: bool = True) -> str:
        """Create a database and return its name."""
        name = f"store_{next(self._numbers)}"
        if migrated and self._template is None:
            self.make_database(_MIGRATED)
            upgrade(self.url(_MIGRATED))
            self._template = _MIGRATED
        self.make_database(name, template=self._template if migrated and self._template else "template1")
        return name


_SERVERS: list[PostgresServer] = []


def shared_server() -> PostgresServer:
    """Return this process's server; start it at the first call."""
    if not _SERVERS:
        server = PostgresServer()
        _SERVERS.append(server)
        server.start()
    return _SERVERS[0]


def remove_servers() -> None:
    while _SERVERS:
        _SERVERS.pop().remove()


@contextmanager
def postgresql_database(*, migrated: bool = True) -> Iterator[str]:
    """Yield the URL of a new database, which is dropped at the end."""
    server = shared_server()
    name = server.new_database(migrated=migrated)
    try:
        yield server.url(name)
    finally:
        server.drop_database(name)


@contextmanager
def files_end_at(size: int) -> Iterator[None]:
    """Simulate a full disk: no file of this process can grow beyond `size` bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@functools.cache
def _migrated_file() -> bytes:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "store.sqlite3"
        upgrade(f"sqlite:///{path}")
        with closing(sqlite3.connect(path)) as connection:
            connection.execute("VACUUM")  # no free pages: what a full disk does is seen at once
        return path.read_bytes()


def assert_whole(url: str) -> None:
    """Fail if `base-rl db check` finds anything: nothing that the program does may look like damage."""
    findings = check(url)
    assert not findings, findings


def sqlite_url(directory: Path) -> str:
    """Return the URL of a store's file in this directory."""
    return f"sqlite:///{directory / 'store.sqlite3'}"


def sqlite_database(directory: Path) -> str:
    """Return the URL of a migrated SQLite file in the directory; create it if it does not exist."""
    path = directory / "store.sqlite3"
    if not path.exists():
        path.write_bytes(_migrated_file())
    return sqlite_url(directory)
