"""Databases for tests: a SQLite file, or a database of a PostgreSQL server that lives as long as the test process.

The server is made where PostgreSQL's programs are found, with initdb, in a directory of its own and reached by a
socket there; BASE_RL_REQUIRE_POSTGRES=1 makes their absence a failure. Every test has a database to itself: a copy of
one that was migrated once, or one that an earlier test used and that was emptied.
"""

from __future__ import annotations

import functools
import itertools
import os
import resource
import sqlite3
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, Self

import psycopg
import pytest
from sqlalchemy import make_url

import benchmarks.postgresql
from benchmarks.postgresql import FORGETFUL, programs
from proxy import startup
from proxy.database import migrate
from proxy.database.migrate import upgrade
from proxy.lifecycle.check import check

WATCHING = "tests.database"
"""The application name of the one connection that the tests themselves have to a database that they use again."""
_MIGRATED = "migrated"
_MOST_GROWTH = 2 << 20
"""Bytes."""
_CLOSING_SECONDS = 2.0

needs_postgresql = pytest.mark.skipif(
    programs() is None and os.environ.get("BASE_RL_REQUIRE_POSTGRES") != "1",
    reason="no PostgreSQL server is installed (apt-get install postgresql)",
)


class PostgresServer(benchmarks.postgresql.PostgresServer):
    """A temporary server with numbered databases. Its commits do not wait for the disk.

    Migrated databases are used again, because PostgreSQL takes a hundred times as long to copy and drop a database as
    to delete the few rows of a test.
    """

    def __init__(self) -> None:
        super().__init__(FORGETFUL)
        self._numbers = itertools.count()
        self._template: _Schema | None = None
        self._free: list[str] = []
        self._watching: dict[str, psycopg.Connection[tuple[Any, ...]]] = {}

    def new_database(self, template: str = "template1") -> str:
        """Create a database and return its name."""
        name = f"store_{next(self._numbers)}"
        self.make_database(name, template=template)
        return name

    def take(self) -> str:
        """Return the name of a migrated database without rows."""
        if self._template is None:
            self.make_database(_MIGRATED)
            upgrade(self.url(_MIGRATED))
            with self.connect(_MIGRATED) as connection:
                self._template = _Schema.read(connection)
        if self._free:
            return self._free.pop()
        name = self.new_database(_MIGRATED)
        # This connection stays open: the first statements of a new one take longer than all that it is needed for.
        self._watching[name] = psycopg.connect(self.url(name), autocommit=True, application_name=WATCHING)
        return name

    def give_back(self, name: str) -> None:
        """Delete all rows, so that another test can use the database. Drop it instead if anything else differs from a
        new one: a connection that is still open, the schema, the planner's statistics or the size."""
        assert self._template is not None
        connection = self._watching.pop(name)
        with suppress(psycopg.OperationalError):  # a test ended all connections to its database
            if _is_alone(connection) and _Schema.read(connection).equals(self._template):
                self._template.delete_rows(connection)
                self._watching[name] = connection
                self._free.append(name)
                return
        connection.close()
        self.drop_database(name)

    def remove(self) -> None:
        for connection in self._watching.values():
            connection.close()
        super().remove()


class _Schema(NamedTuple):
    """A database's tables and sequences, a digest of their definitions and statistics, and their size in bytes."""

    tables: tuple[str, ...]
    digest: int
    size: int

    @classmethod
    def read(cls, connection: psycopg.Connection[tuple[Any, ...]]) -> Self:
        """Read the schema `public`. Every change of a definition is a new row version of the catalogue (`xmin`)."""
        tables = connection.execute("SELECT tablename FROM pg_tables WHERE schemaname = 'public'").fetchall()
        row = connection.execute(
            """
            WITH relations AS (SELECT oid, xmin, relname, relkind, reltuples FROM pg_class
                               WHERE relnamespace = 'public'::regnamespace),
                 parts (part) AS (
                SELECT concat_ws(',', oid, xmin, relname, reltuples) FROM relations
                UNION ALL SELECT concat_ws(',', attrelid, attnum, attribute.xmin)
                          FROM pg_attribute AS attribute JOIN relations ON attrelid = relations.oid
                UNION ALL SELECT concat_ws(',', oid, xmin) FROM pg_constraint
                          WHERE connamespace = 'public'::regnamespace
                UNION ALL SELECT concat_ws(',', oid, xmin) FROM pg_trigger
                UNION ALL SELECT version_num FROM alembic_version)
            SELECT (SELECT sum(hashtextextended(part, 0)) FROM parts),
                   (SELECT sum(pg_relation_size(oid)) FROM relations WHERE relkind IN ('r', 'i'))
            """
        ).fetchone()
        assert row is not None
        return cls(tuple(name for (name,) in tables if name != "alembic_version"), int(row[0]), int(row[1]))

    def equals(self, template: _Schema) -> bool:
        """Return whether a copy of the template still has its schema and is not much larger: deleted rows take space
        and time until VACUUM removes them."""
        return self.digest == template.digest and self.size < template.size + _MOST_GROWTH

    def delete_rows(self, connection: psycopg.Connection[tuple[Any, ...]]) -> None:
        """Delete all rows, and let the sequences begin anew. Foreign keys are not checked meanwhile."""
        deletions = "".join(f"DELETE FROM {table};" for table in self.tables)
        connection.execute(
            f"BEGIN; SET LOCAL session_replication_role = replica; {deletions}"
            # The migrations insert the default project, so an empty store has it.
            "INSERT INTO projects (id, name, created_at, settings) VALUES ('prj_default', 'default', 0, '{}');"
            "SELECT setval(seqrelid::regclass, seqstart, false) FROM pg_sequence; COMMIT".encode()
        )


def _is_alone(connection: psycopg.Connection[tuple[Any, ...]]) -> bool:
    """Wait until no other connection to the database is open. Return False if one stays open.

    The server notices a moment later that a connection was closed.
    """
    deadline = time.monotonic() + _CLOSING_SECONDS
    query = "SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
    while connection.execute(query).fetchone() is not None:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.002)
    return True


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
    """Yield the URL of a database that nobody else uses, without rows or, unless `migrated`, without tables."""
    server = shared_server()
    name, end = (server.take(), server.give_back) if migrated else (server.new_database(), server.drop_database)
    try:
        yield server.url(name)
    finally:
        end(name)


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


def start_with_migrated_stores() -> None:
    """Let proxies of this process begin a SQLite store with a copy of one that was migrated, which they migrate like
    any other. All migrations take a third of a second, and hundreds of tests start a proxy."""
    migrate_anew = migrate.upgrade

    def upgrade(url: str, revision: str = migrate.HEAD) -> None:
        path = make_url(url).database
        if url.startswith("sqlite:") and path is not None and not Path(path).exists():
            # An error is left to the migration, which explains it.
            with suppress(OSError), tempfile.NamedTemporaryFile(dir=Path(path).parent) as copy:
                copy.write(_migrated_file())
                copy.flush()
                os.link(copy.name, path)  # fails if another proxy made the store meanwhile
        migrate_anew(url, revision)

    setattr(startup, "migrate", SimpleNamespace(upgrade=upgrade))  # noqa: B010  (mypy would have a module there)


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
