"""One transaction, and the ways to open it: for changes or for a consistent look, as a function or as a block.

A function of a connection (`transact`, `look`) runs in one go. On SQLite that is one hop to a thread, where the async
driver makes four for each statement, and functions that arrive together share a transaction. It is the way of what a
model call waits for. A block (`write`, `read`) may wait for other things in between; it is for everything else.

SQLite has one writer at a time, so writes queue here, in order and without lock errors, instead of in SQLite's busy
handler, and start with BEGIN IMMEDIATE. Reads have connections of their own and see the last committed state (WAL).
On other databases all share one pool.
"""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import msgspec
from sqlalchemy import URL, Connection, Engine, create_engine, event, make_url
from sqlalchemy.exc import DBAPIError, OperationalError
from sqlalchemy.ext.asyncio import AsyncConnection, create_async_engine
from sqlalchemy.pool import NullPool

from proxy.database.group_commit import GroupCommit
from proxy.database.threads import ConnectionThreads
from proxy.errors import StoreUnavailable

_READERS = 4
_BEGIN_WRITING = "BEGIN IMMEDIATE"
_BEGIN_READING = "BEGIN"

_Result = TypeVar("_Result")


class Database:
    """The store's connections. `url` is a SQLAlchemy URL with an async driver."""

    def __init__(self, url: str, *, synchronous: str = "normal", busy_timeout_seconds: float = 10.0) -> None:
        self.url = make_url(url)
        self._threads: _Threads | None = None
        self._group = GroupCommit(self._write_at_once)
        self._sole_writer: Callable[[], AbstractAsyncContextManager[None]] = nullcontext
        if self.url.get_backend_name() == "sqlite":
            if self.url.database in (None, "", ":memory:"):
                raise ValueError("the store needs a SQLite file: an in-memory one is not shared between connections")
            Path(str(self.url.database)).parent.mkdir(parents=True, exist_ok=True)
            timeout = {"timeout": busy_timeout_seconds}
            common: dict[str, Any] = {"max_overflow": 0, "connect_args": timeout, "json_serializer": json_text}
            self._writer = create_async_engine(url, pool_size=1, **common)
            self._reader = create_async_engine(url, pool_size=_READERS, **common)
            for engine, begin in ((self._writer, _BEGIN_WRITING), (self._reader, _BEGIN_READING)):
                _configure_sqlite(engine.sync_engine, synchronous=synchronous)
                _begin_with(engine.sync_engine, begin)
            self._threads = _Threads(self.url, synchronous=synchronous, timeout=timeout)
            self._sole_writer = self._group.held
        else:
            self._writer = self._reader = create_async_engine(url, pool_pre_ping=True, json_serializer=json_text)

    async def transact(self, work: Callable[[Connection], _Result]) -> _Result:
        """What `work` returned, once what it wrote is committed; or what it raised, and then it changed nothing.

        It must only use its connection, and wait for nothing else. A caller that is cancelled does not undo it.
        Raises StoreUnavailable when the database cannot be reached or written (down, locked, disk full).
        """
        try:
            return await self._group.commit(work)
        except DBAPIError as error:
            _raise_told(error)

    async def look(self, work: Callable[[Connection], _Result]) -> _Result:
        """What `work` read of one committed state. Raises StoreUnavailable like `transact`."""
        try:
            if self._threads is not None:
                return await self._threads.readers.run(work)
            async with self._reader.connect() as connection:
                return await connection.run_sync(work)
        except DBAPIError as error:
            _raise_told(error)

    @asynccontextmanager
    async def write(self) -> AsyncIterator[AsyncConnection]:
        """A transaction that commits at the end of the block and rolls back on any exception.

        Nothing else is written meanwhile on SQLite: do not wait in it for what may take long, nor for `transact`.
        Raises StoreUnavailable like `transact`.
        """
        try:
            async with self._sole_writer(), self._writer.begin() as connection:
                yield connection
        except DBAPIError as error:
            _raise_told(error)

    @asynccontextmanager
    async def read(self) -> AsyncIterator[AsyncConnection]:
        """A read-only look at one committed state. Raises StoreUnavailable like `transact`."""
        try:
            async with self._reader.connect() as connection:
                yield connection
        except DBAPIError as error:
            _raise_told(error)

    async def aclose(self) -> None:
        """Waits for what is being written."""
        await self._group.aclose()
        if self._threads is not None:
            self._threads.close()
        await self._writer.dispose()
        if self._reader is not self._writer:
            await self._reader.dispose()

    def _write_at_once(self, work: Callable[[Connection], _Result]) -> asyncio.Future[_Result]:
        if self._threads is not None:
            return self._threads.writer.run(work)
        return asyncio.ensure_future(self._begin(work))

    async def _begin(self, work: Callable[[Connection], _Result]) -> _Result:
        async with self._writer.begin() as connection:
            return await connection.run_sync(work)


def json_text(value: Any) -> str:
    """For JSON columns. What is no UTF-8 or no 64 bits is written by the slower way that can."""
    try:
        return msgspec.json.encode(value).decode()
    except (UnicodeEncodeError, OverflowError, TypeError):
        return json.dumps(value)


class _Threads:
    """SQLite's writer and readers for `transact` and `look`."""

    def __init__(self, url: URL, *, synchronous: str, timeout: dict[str, float]) -> None:
        sync_url = url.set(drivername="sqlite")
        writer = create_engine(sync_url, poolclass=NullPool, connect_args=timeout, json_serializer=json_text)
        reader = create_engine(sync_url, poolclass=NullPool, connect_args=timeout, json_serializer=json_text)
        _configure_sqlite(writer, synchronous=synchronous)
        _configure_sqlite(reader, synchronous=synchronous)
        self.writer = ConnectionThreads(writer, begin=_BEGIN_WRITING, count=1, name="store-writer")
        self.readers = ConnectionThreads(reader, begin=_BEGIN_READING, count=_READERS, name="store-reader")

    def close(self) -> None:
        self.writer.close()
        self.readers.close()


def _raise_told(error: DBAPIError) -> NoReturn:
    """What callers are told of it."""
    if isinstance(error, OperationalError):
        raise StoreUnavailable(f"the trajectory store cannot be used now: {error.orig}") from error
    if error.connection_invalidated:
        raise StoreUnavailable("the connection to the trajectory store was lost") from error
    raise error


def _configure_sqlite(engine: Engine, *, synchronous: str) -> None:
    """WAL, foreign keys, and transactions that begin when we say so (the driver's own late BEGIN is switched off)."""

    @event.listens_for(engine, "connect")
    def on_connect(connection: sqlite3.Connection, _record: object) -> None:
        connection.isolation_level = None
        cursor = connection.cursor()
        cursor.execute("PRAGMA journal_mode = WAL")
        cursor.execute(f"PRAGMA synchronous = {synchronous.upper()}")
        cursor.execute("PRAGMA foreign_keys = ON")
        cursor.execute("PRAGMA temp_store = MEMORY")
        cursor.execute("PRAGMA cache_size = -32768")  # KiB: of the indexes that each turn adds to at a random place
        cursor.execute("PRAGMA wal_autocheckpoint = 4000")  # pages: a commit that waits for the disk every 16 MiB
        cursor.close()


def _begin_with(engine: Engine, begin: str) -> None:
    @event.listens_for(engine, "begin")
    def on_begin(connection: Connection) -> None:
        connection.exec_driver_sql(begin)
