"""Databases for tests: a SQLite file, or a database of a PostgreSQL server that lives as long as the test process.

The server is made where PostgreSQL's programs are found, with initdb, in a directory of its own and reached by a
socket there; BASE_RL_REQUIRE_POSTGRES=1 makes their absence a failure. Every test gets a database copied from one
that was migrated once.
"""

from __future__ import annotations

import functools
import itertools
import os
import pwd
import shutil
import sqlite3
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import psycopg
import pytest

from proxy.database.migrate import upgrade

_USER = "postgres"
_MIGRATED = "migrated"
_START_SECONDS = 60.0


def postgresql_programs() -> Path | None:
    """The directory of the newest PostgreSQL server that is installed."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: int(path.parent.parent.name))
    if found:
        return found[-1].parent
    initdb = shutil.which("initdb")
    return Path(initdb).resolve().parent if initdb is not None else None


needs_postgresql = pytest.mark.skipif(
    postgresql_programs() is None and os.environ.get("BASE_RL_REQUIRE_POSTGRES") != "1",
    reason="no PostgreSQL server is installed (apt-get install postgresql)",
)


class PostgresServer:
    """A throw-away PostgreSQL. It ends with this process at the latest, and its files with it."""

    def __init__(self) -> None:
        programs = postgresql_programs()
        assert programs is not None, "BASE_RL_REQUIRE_POSTGRES=1, and no PostgreSQL server is installed"
        self._programs = programs
        self._directory = Path(tempfile.mkdtemp(prefix="base-rl-pg-"))
        self._data = self._directory / "data"
        self._process: subprocess.Popen[bytes] | None = None
        self._numbers = itertools.count()
        self._template: str | None = None
        if os.geteuid() == 0:  # PostgreSQL refuses to be root
            owner = pwd.getpwnam(_USER)
            os.chown(self._directory, owner.pw_uid, owner.pw_gid)
        subprocess.run(
            [
                *self._as_owner(),
                str(programs / "initdb"),
                *("--pgdata", str(self._data), "--username", _USER, "--auth", "trust", "--no-sync"),
                *("--encoding", "UTF8", "--locale-provider", "icu", "--icu-locale", "en-US"),
            ],
            check=True,
            stdout=subprocess.DEVNULL,
            cwd="/",
        )

    def start(self) -> None:
        """Returns once it takes connections."""
        settings = {
            "listen_addresses": "",
            "unix_socket_directories": str(self._directory),
            "fsync": "off",
            "full_page_writes": "off",
            "autovacuum": "off",
            "max_connections": "100",
            "shared_buffers": "64MB",
            "log_min_messages": "FATAL",
            "deadlock_timeout": "50ms",
        }
        options = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        with (self._directory / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [*self._as_owner(), str(self._programs / "postgres"), "-D", str(self._data), *options],
                stdout=log,
                stderr=log,
                cwd="/",
            )
        deadline = time.monotonic() + _START_SECONDS
        while True:
            try:
                self._connect("postgres").close()
            except psycopg.OperationalError:
                ended = self._process.poll() is not None
                if ended or time.monotonic() > deadline:
                    raise RuntimeError((self._directory / "log").read_text()) from None
                time.sleep(0.02)
            else:
                return

    def stop(self) -> None:
        """At once, as a crash would: what was not on the disk is recovered from the log at the next start."""
        if self._process is not None:
            self._process.send_signal(subprocess.signal.SIGQUIT)  # type: ignore[attr-defined]
            self._process.wait()
            self._process = None

    def kill(self) -> None:
        """kill -9 of the server process; its children notice that by themselves."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()
        self._process = None

    def remove(self) -> None:
        self.stop()
        shutil.rmtree(self._directory, ignore_errors=True)

    def url(self, database: str) -> str:
        return f"postgresql://{_USER}@/{database}?host={self._directory}"

    def make_database(self, *, migrated: bool = True) -> str:
        """A new one; its name."""
        name = f"store_{next(self._numbers)}"
        if migrated and self._template is None:
            self._run(f"CREATE DATABASE {_MIGRATED}")
            upgrade(self.url(_MIGRATED))
            self._template = _MIGRATED
        self._run(f"CREATE DATABASE {name} TEMPLATE {self._template if migrated else 'template1'}")
        return name

    def drop_database(self, name: str) -> None:
        self._run(f"DROP DATABASE {name} WITH (FORCE)")

    def _run(self, statement: str) -> None:
        with self._connect("postgres") as connection:
            connection.execute(statement)

    def _connect(self, database: str) -> psycopg.Connection[tuple[object, ...]]:
        return psycopg.connect(self.url(database), autocommit=True, connect_timeout=5)

    def _as_owner(self) -> list[str]:
        """With this process, however that ends, ends the server."""
        change = ["--reuid", _USER, "--regid", _USER, "--clear-groups"] if os.geteuid() == 0 else []
        return ["setpriv", "--pdeathsig", "QUIT", *change, "--"]


_SERVERS: list[PostgresServer] = []


def shared_server() -> PostgresServer:
    """The one of this process, started when it is first needed."""
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
    """The URL of a new database, which is dropped at the end."""
    server = shared_server()
    name = server.make_database(migrated=migrated)
    try:
        yield server.url(name)
    finally:
        server.drop_database(name)


@functools.cache
def _migrated_file() -> bytes:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "store.sqlite3"
        upgrade(f"sqlite:///{path}")
        with closing(sqlite3.connect(path)) as connection:
            connection.execute("VACUUM")  # no free pages: what a full disk does is seen at once
        return path.read_bytes()


def sqlite_url(directory: Path) -> str:
    """Of the file that a store in this directory has."""
    return f"sqlite+aiosqlite:///{directory / 'store.sqlite3'}"


def sqlite_database(directory: Path) -> str:
    """The URL of a migrated SQLite file in the directory; the one that is there, if there is one."""
    path = directory / "store.sqlite3"
    if not path.exists():
        path.write_bytes(_migrated_file())
    return sqlite_url(directory)
