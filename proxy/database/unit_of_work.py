"""One transaction, and the two ways to open it: `write` for changes, `read` for a consistent look.

SQLite has one writer at a time, so writes go through a pool of one connection that starts with BEGIN IMMEDIATE:
they queue here, in order and without lock errors, instead of in SQLite's busy handler. Reads have connections of
their own and see the last committed state (WAL). On other databases both share one pool.
"""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from sqlalchemy import Connection, event, make_url
from sqlalchemy.exc import DBAPIError, OperationalError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from proxy.errors import StoreUnavailable

_READERS = 4


class Database:
    """The store's connections. `url` is a SQLAlchemy URL with an async driver."""

    def __init__(self, url: str, *, synchronous: str = "normal", busy_timeout_seconds: float = 10.0) -> None:
        self.url = make_url(url)
        self._is_sqlite = self.url.get_backend_name() == "sqlite"
        if self._is_sqlite:
            if self.url.database in (None, "", ":memory:"):
                raise ValueError("the store needs a SQLite file: an in-memory one is not shared between connections")
            Path(str(self.url.database)).parent.mkdir(parents=True, exist_ok=True)
            timeout = {"timeout": busy_timeout_seconds}
            self._writer = create_async_engine(url, pool_size=1, max_overflow=0, connect_args=timeout)
            self._reader = create_async_engine(url, pool_size=_READERS, max_overflow=0, connect_args=timeout)
            _configure_sqlite(self._writer, synchronous=synchronous, begin="BEGIN IMMEDIATE")
            _configure_sqlite(self._reader, synchronous=synchronous, begin="BEGIN")
        else:
            self._writer = self._reader = create_async_engine(url, pool_pre_ping=True)

    @asynccontextmanager
    async def write(self) -> AsyncIterator[AsyncConnection]:
        """A transaction that commits at the end of the block and rolls back on any exception.

        Raises StoreUnavailable when the database cannot be reached or written (down, locked, disk full).
        """
        async with _store_errors(), self._writer.begin() as connection:
            yield connection

    @asynccontextmanager
    async def read(self) -> AsyncIterator[AsyncConnection]:
        """A read-only look at one committed state. Raises StoreUnavailable like `write`."""
        async with _store_errors(), self._reader.connect() as connection:
            yield connection

    async def aclose(self) -> None:
        await self._writer.dispose()
        if self._reader is not self._writer:
            await self._reader.dispose()


@asynccontextmanager
async def _store_errors() -> AsyncIterator[None]:
    try:
        yield
    except OperationalError as error:
        raise StoreUnavailable(f"the trajectory store cannot be used now: {error.orig}") from error
    except DBAPIError as error:
        if error.connection_invalidated:
            raise StoreUnavailable("the connection to the trajectory store was lost") from error
        raise


def _configure_sqlite(engine: AsyncEngine, *, synchronous: str, begin: str) -> None:
    """WAL, foreign keys, and transactions that begin when we say so (the driver's own late BEGIN is switched off)."""

    @event.listens_for(engine.sync_engine, "connect")
    def on_connect(connection: sqlite3.Connection, _record: object) -> None:
        connection.isolation_level = None
        cursor = connection.cursor()
        cursor.execute("PRAGMA journal_mode = WAL")
        cursor.execute(f"PRAGMA synchronous = {synchronous.upper()}")
        cursor.execute("PRAGMA foreign_keys = ON")
        cursor.execute("PRAGMA temp_store = MEMORY")
        cursor.close()

    @event.listens_for(engine.sync_engine, "begin")
    def on_begin(connection: Connection) -> None:
        connection.exec_driver_sql(begin)
