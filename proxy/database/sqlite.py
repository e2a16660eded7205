"""SQLite's side of the store: one writer at a time, and readers that see the last committed state (WAL)."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from sqlalchemy import URL, Connection, Engine, create_engine, event
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import NullPool

from proxy.database.backend import Backend
from proxy.database.checkpoints import LONG_LOG, Checkpoints
from proxy.database.integrity import Integrity
from proxy.database.packed_json import json_text
from proxy.database.threads import ConnectionThreads, begin_by
from proxy.private_files import make_directory, make_file
from proxy.settings import ConfigurationError

DEFAULT_SYNCHRONOUS = "full"
"""Every commit waits for the disk. Writes that arrive together share it, so calls per second are the same within what
can be measured; a call that comes alone waits one flush longer."""

_BEGIN_WRITING = "BEGIN IMMEDIATE"
_BEGIN_READING = "BEGIN"
_READERS = 4
"""Connections that read at once."""
_LOG_BYTES = 64 << 20
"""The log's file is cut to this when the log starts again from its beginning, however long it had become."""
_SCRUB_PATIENCE_SECONDS = 0.2
"""Writers wait meanwhile."""


def open_sqlite(url: URL, *, synchronous: str | None, busy_timeout_seconds: float) -> Backend:
    """Open the store's file, which is made if it is missing. Raises ValueError for an in-memory database, and
    ConfigurationError if the file's directory cannot be made."""
    if url.database in (None, "", ":memory:"):
        raise ValueError("the store needs a SQLite file: an in-memory one is not shared between connections")
    try:
        make_directory(Path(str(url.database)).parent)
        make_file(Path(str(url.database)))
    except OSError as error:
        raise ConfigurationError(
            f"the store {url.database} cannot be made ({error.strerror or error}): give base-rl the right to write "
            "there, or name another place"
        ) from error
    level = synchronous or DEFAULT_SYNCHRONOUS
    timeout = {"timeout": busy_timeout_seconds}
    plain = url.set(drivername="sqlite")  # the URL may name an async driver, and ours is the standard library's
    writing, reading = (
        create_engine(plain, poolclass=NullPool, connect_args=timeout, json_serializer=json_text) for _ in range(2)
    )
    for engine in (writing, reading):
        _configure(engine, synchronous=level)
    checkpoints = Checkpoints(str(url.database))
    write_threads = ConnectionThreads(
        writing, count=1, name="store-writer", is_lost=_is_never_lost, committed=checkpoints.committed
    )
    read_threads = ConnectionThreads(reading, count=_READERS, name="store-reader", is_lost=_is_never_lost)
    begin_writing, begin_reading = begin_by(_BEGIN_WRITING), begin_by(_BEGIN_READING)

    def close() -> None:
        write_threads.close()
        read_threads.close()
        checkpoints.close()

    return Backend(
        write=lambda work: write_threads.run(work, begin_writing),
        read=lambda work: read_threads.run(work, begin_reading),
        lanes=1,
        is_unavailable=is_unavailable,
        may_retry=lambda _error: False,
        reason=lambda error: " ".join(str(error.orig).split()),
        close=close,
        integrity=Integrity(str(url.database)),
    )


def scrub(path: str) -> bool:
    """Writes the log back into the file and empties it: what was erased is then in neither. Whether that could be
    done now; not while somebody reads what was before."""
    connection = sqlite3.connect(path, timeout=_SCRUB_PATIENCE_SECONDS)
    try:
        busy, _written, _moved = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        return not busy
    finally:
        connection.close()


def is_unavailable(error: DBAPIError) -> bool:
    """Of errors that are not OperationalErrors: a damaged file. The subclasses are other things."""
    return type(error.orig) is sqlite3.DatabaseError


def _is_never_lost(_connection: Connection) -> bool:
    """A file does not hang up."""
    return False


def _configure(engine: Engine, *, synchronous: str) -> None:
    """WAL, foreign keys, and transactions that begin when we say so (the driver's own late BEGIN is switched off)."""

    @event.listens_for(engine, "connect")
    def on_connect(connection: sqlite3.Connection, _record: object) -> None:
        connection.isolation_level = None
        cursor = connection.cursor()
        cursor.execute("PRAGMA journal_mode = WAL")
        cursor.execute(f"PRAGMA synchronous = {synchronous.upper()}")
        cursor.execute("PRAGMA foreign_keys = ON")
        cursor.execute("PRAGMA secure_delete = ON")  # what is erased is overwritten
        cursor.execute("PRAGMA temp_store = MEMORY")
        cursor.execute("PRAGMA cache_size = -32768")  # KiB: of the indexes that each turn adds to at a random place
        # A commit that finds so much in the log writes it back itself and waits for the disk; mostly `Checkpoints`
        # were there before.
        cursor.execute(f"PRAGMA wal_autocheckpoint = {LONG_LOG}")
        cursor.execute(f"PRAGMA journal_size_limit = {_LOG_BYTES}")
        cursor.close()
