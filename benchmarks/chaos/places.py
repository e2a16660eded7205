"""Databases for a run of chaos, on a small disk that can be filled."""

from __future__ import annotations

import itertools
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from benchmarks.chaos.accounts import Ask, asking_postgresql, asking_sqlite
from benchmarks.postgresql import PostgresServer

CONNECTION_CAP = 5
"""Connections that PostgreSQL grants the proxy's role, as small hosted databases do."""

_DISK_MIB = 700
_BALLAST_STEP = 1 << 16
_ROLE = "agent"
_SETTINGS = {"max_connections": "100", "shared_buffers": "64MB", "max_wal_size": "128MB", "min_wal_size": "32MB"}


@dataclass(frozen=True, kw_only=True)
class Place:
    """A database. `disk` is the directory of its files; None if it cannot be filled, because mounting needs root."""

    url: str
    free_url: str
    """The same database for processes that the bound on connections does not concern."""
    ask: Ask
    disk: Path | None
    server: PostgresServer | None = None

    def revive(self) -> None:
        """Start the database server again if it ended, which PostgreSQL does when its log has no room."""
        if self.server is not None and not self.server.alive:
            self.server.start()


@contextmanager
def place(database: str, folder: Path) -> Iterator[Place]:
    """Return a new, empty database. Raises FileNotFoundError if PostgreSQL is asked for and not installed."""
    with _small_disk(folder / f"disk-{database}") as (directory, is_mounted):
        disk = directory if is_mounted else None
        if database == "sqlite":
            file = directory / "store.sqlite3"
            yield Place(url=f"sqlite:///{file}", free_url=f"sqlite:///{file}", ask=asking_sqlite(file), disk=disk)
            return
        server = PostgresServer(_SETTINGS, directory)
        server.start()
        try:
            server.run(f"CREATE ROLE {_ROLE} LOGIN CONNECTION LIMIT {CONNECTION_CAP}")
            server.run(f"CREATE DATABASE chaos OWNER {_ROLE}")
            yield Place(
                url=server.url("chaos", user=_ROLE),
                free_url=server.url("chaos"),
                ask=asking_postgresql(server.url("chaos")),
                disk=disk,
                server=server,
            )
        finally:
            server.remove()


@contextmanager
def _small_disk(directory: Path) -> Iterator[tuple[Path, bool]]:
    """Make a file system in memory. Returns its directory and True; without root, an ordinary directory and False."""
    directory.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={_DISK_MIB}m,mode=755", "tmpfs", str(directory)]
    is_mounted = os.geteuid() == 0 and subprocess.run(mount, check=False, capture_output=True).returncode == 0
    try:
        yield directory, is_mounted
    finally:
        if is_mounted:
            subprocess.run(["umount", "--lazy", str(directory)], check=True)


@contextmanager
def full(disk: Path) -> Iterator[None]:
    """Use all free space of a disk while the block lasts."""
    ballast = disk / "ballast"
    try:
        with ballast.open("wb") as file, suppress(OSError):
            for start in itertools.count(0, _BALLAST_STEP):  # in steps, because others write meanwhile
                os.posix_fallocate(file.fileno(), start, _BALLAST_STEP)
        yield
    finally:
        ballast.unlink()
