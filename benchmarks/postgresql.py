"""A private PostgreSQL server: made, started and removed by this process."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import psycopg

USER = "postgres"
_START_SECONDS = 60.0
_END_SECONDS = 10.0

DURABLE = {"max_connections": "100", "shared_buffers": "256MB", "max_wal_size": "4GB"}
"""Settings of an ordinary server with a little more memory."""

FORGETFUL = {
    "fsync": "off",
    "full_page_writes": "off",
    "autovacuum": "off",
    "max_connections": "100",
    "shared_buffers": "64MB",
    "deadlock_timeout": "50ms",
}
"""Settings for tests: after a crash of the machine, everything may be lost."""


def programs() -> Path | None:
    """Return the directory of the newest installed PostgreSQL server."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: int(path.parent.parent.name))
    if found:
        return found[-1].parent
    initdb = shutil.which("initdb")
    return Path(initdb).resolve().parent if initdb is not None else None


class PostgresServer:
    """A PostgreSQL server that ends with this process at the latest. Raises FileNotFoundError if it is not
    installed."""

    def __init__(self, settings: Mapping[str, str], directory: Path | None = None) -> None:
        found = programs()
        if found is None:
            raise FileNotFoundError("no PostgreSQL server is installed: apt-get install postgresql")
        self._programs = found
        self._settings = settings
        self._directory = Path(tempfile.mkdtemp(prefix="base-rl-pg-", dir=directory))
        self._data = self._directory / "data"
        self._process: subprocess.Popen[bytes] | None = None
        if os.geteuid() == 0:  # PostgreSQL refuses to run as root
            owner = pwd.getpwnam(USER)
            os.chown(self._directory, owner.pw_uid, owner.pw_gid)
        subprocess.run(
            [
                *self._as_owner(),
                str(found / "initdb"),
                *("--pgdata", str(self._data), "--username", USER, "--auth", "trust", "--no-sync"),
                # Sort text by language, as most servers do: nothing may depend on the order of bytes.
                *("--encoding", "UTF8", "--locale-provider", "icu", "--icu-locale", "en-US"),
            ],
            check=True,
            stdout=subprocess.DEVNULL,
            cwd="/",
        )

    def start(self) -> None:
        """Start the server and return once it accepts connections."""
        settings = {
            "listen_addresses": "",
            "unix_socket_directories": str(self._directory),
            "log_min_messages": "FATAL",
            **self._settings,
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
                self.connect("postgres").close()
            except psycopg.OperationalError:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError((self._directory / "log").read_text()) from None
                time.sleep(0.02)
            else:
                return

    def stop(self) -> None:
        """Stop the server at once, like a crash: committed data is recovered from the log at the next start."""
        if self._process is not None:
            self._process.send_signal(signal.SIGQUIT)
            self._process.wait()
            self._process = None

    def kill(self) -> None:
        """kill -9 of the server process; wait until its children, which serve connections, have ended (Linux)."""
        assert self._process is not None
        listed = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children")
        children = [Path("/proc") / pid for pid in listed.read_text().split()] if listed.exists() else []
        self._process.kill()
        self._process.wait()
        self._process = None
        deadline = time.monotonic() + _END_SECONDS
        while any(child.exists() for child in children) and time.monotonic() < deadline:
            time.sleep(0.01)

    def remove(self) -> None:
        """Remove the server with all its databases."""
        self.stop()
        shutil.rmtree(self._directory, ignore_errors=True)

    @property
    def alive(self) -> bool:
        """Whether the server runs. It may end by itself, for example when its disk is full."""
        return self._process is not None and self._process.poll() is None

    def url(self, database: str, *, user: str = USER) -> str:
        return f"postgresql://{user}@/{database}?host={self._directory}"

    def make_database(self, name: str, template: str = "template1") -> None:
        self.run(f"CREATE DATABASE {name} TEMPLATE {template}")

    def drop_database(self, name: str) -> None:
        self.run(f"DROP DATABASE {name} WITH (FORCE)")

    def run(self, statement: str) -> None:
        with self.connect("postgres") as connection:
            connection.execute(statement.encode())

    def connect(self, database: str) -> psycopg.Connection[tuple[object, ...]]:
        return psycopg.connect(self.url(database), autocommit=True, connect_timeout=5)

    def _as_owner(self) -> list[str]:
        """Set up a child process to run as the server's user and to end with this process, however that ends
        (Linux)."""
        if shutil.which("setpriv") is None:
            return []
        change = ["--reuid", USER, "--regid", USER, "--clear-groups"] if os.geteuid() == 0 else []
        return ["setpriv", "--pdeathsig", "QUIT", *change, "--"]
