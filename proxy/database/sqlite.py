"""The SQLite backend: one writer at a time, and readers that see the last committed state (WAL mode)."""

from __future__ import annotations

import sqlite3
from functools import partial
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

# Every commit waits for the disk. Writes that arrive together share one flush, so the rate of calls does not suffer;
# a call that comes alone waits one flush longer.
DEFAULT_SYNCHRONOUS = "full"

_BEGIN_WRITING = "BEGIN IMMEDIATE"
_BEGIN_READING = "BEGIN"
# The number of connections that read at the same time.
_READERS = 4
# The write-ahead log's file is truncated to this size when the log restarts, however long it had become.
_LOG_BYTES = 64 << 20
# How long `scrub` waits for readers. Writers wait meanwhile, so it is short.
_SCRUB_PATIENCE_SECONDS = 0.2


def open_sqlite(url: URL, *, synchronous: str | None, busy_timeout_seconds: float) -> Backend:
    """Open the store's file; create it if it is missing.

    Raise ValueError for an in-memory database, and ConfigurationError if the file or its directory cannot be created.
    """
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

    def close() -> None:
        write_threads.close()
        read_threads.close()
        checkpoints.close()

    return Backend(
        write=partial(write_threads.run, begin=begin_by(_BEGIN_WRITING)),
        read=partial(read_threads.run, begin=begin_by(_BEGIN_READING)),
        lanes=1,
        is_unavailable=is_unavailable,
        may_retry=lambda _error: False,
        reason=lambda error: " ".join(str(error.orig).split()),
        close=close,
        integrity=Integrity(str(url.database)),
    )


def scrub(path: str) -> bool:
    """Write the log back into the file and empty it, so that erased content is in neither.

    Return False if a reader of an older state prevents it now.
    """
    connection = sqlite3.connect(path, timeout=_SCRUB_PATIENCE_SECONDS)
    try:
        busy, _written, _moved = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        return not busy
    finally:
        connection.close()


def is_unavailable(error: DBAPIError) -> bool:
    """Return whether the error, which is no OperationalError, means a damaged file."""
    # sqlite3 raises the bare class for SQLITE_CORRUPT and SQLITE_NOTADB; its subclasses mean other things.
    return type(error.orig) is sqlite3.DatabaseError


def _is_never_lost(_connection: Connection) -> bool:
    return False  # a file does not close the connection


def _configure(engine: Engine, *, synchronous: str) -> None:
    """Set the pragmas of every new connection."""

    @event.listens_for(engine, "connect")
    def on_connect(connection: sqlite3.Connection, _record: object) -> None:
        connection.isolation_level = (
            None  # the driver's own late BEGIN is off: `ConnectionThreads` starts transactions
        )
        cursor = connection.cursor()
        cursor.execute("PRAGMA journal_mode = WAL")  # readers and the writer do not wait for each other
        cursor.execute(f"PRAGMA synchronous = {synchronous.upper()}")
        cursor.execute("PRAGMA foreign_keys = ON")
        cursor.execute("PRAGMA secure_delete = ON")  # erased content is overwritten with zeros
        cursor.execute("PRAGMA temp_store = MEMORY")  # temporary sorts and indexes do not touch the disk
        # 32 MiB: each turn adds to several indexes at random places, whose pages must stay in memory.
        cursor.execute("PRAGMA cache_size = -32768")
        # A commit that finds this many pages in the log writes them back itself and waits for the disk. `Checkpoints`
        # normally does so before, on its own thread; this is the bound if it cannot keep up.
        cursor.execute(f"PRAGMA wal_autocheckpoint = {LONG_LOG}")
        cursor.execute(f"PRAGMA journal_size_limit = {_LOG_BYTES}")
        cursor.close()
