"""The store's transactions, as functions of a connection: `commit` runs one that writes, `read` one that only reads.

The function runs on a thread that keeps its connection, in one hop; an async driver needs several hops for each
statement. Functions that write and arrive together share a transaction (`GroupCommit`). A function must use nothing
but its connection and wait for nothing else, and it may run several times before its transaction commits once.

SQLite has one writer at a time. Writes therefore queue here, in order of arrival, and not in SQLite's busy handler,
which is unfair and gives up with "database is locked". On PostgreSQL other proxies write at the same time: a function
that fails on a conflict with them (a deadlock, two inserts of one name) runs again.
"""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn, TypeVar

from sqlalchemy import Connection, make_url, text
from sqlalchemy.exc import DataError, DBAPIError, InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolExhausted

from proxy.database.backend import Backend
from proxy.database.group_commit import GroupCommit
from proxy.database.integrity import IntegrityState, is_damage
from proxy.database.postgresql import open_postgresql
from proxy.database.probe import WriteProbe
from proxy.database.sqlite import open_sqlite, scrub
from proxy.errors import InvalidRequest, StoreContended, StoreUnavailable
from proxy.log import logger
from proxy.settings import DEFAULT_CONNECTIONS

# The least time between two log lines about an unusable store: during an outage every call fails alike.
_LOG_SECONDS = 10.0

_LOG = logger(__name__)

_Result = TypeVar("_Result")
_DriverError = DBAPIError | PoolExhausted | OverflowError | UnicodeEncodeError
_DRIVER_ERRORS = (DBAPIError, PoolExhausted, OverflowError, UnicodeEncodeError)


class Database:
    """The store. `url` names a SQLite file or a PostgreSQL database, with any driver or none."""

    def __init__(
        self,
        url: str,
        *,
        synchronous: str | None = None,
        busy_timeout_seconds: float = 10.0,
        connect_timeout_seconds: float = 5.0,
        statement_timeout_seconds: float = 60.0,
        connections: int = DEFAULT_CONNECTIONS,
    ) -> None:
        self.url = make_url(url)
        if self.url.get_backend_name() == "sqlite":
            backend = open_sqlite(self.url, synchronous=synchronous, busy_timeout_seconds=busy_timeout_seconds)
        else:
            backend = open_postgresql(
                self.url,
                synchronous=synchronous,
                busy_timeout_seconds=busy_timeout_seconds,
                connect_timeout_seconds=connect_timeout_seconds,
                statement_timeout_seconds=statement_timeout_seconds,
                connections=connections,
            )
        self._backend: Backend = backend
        self._log_again_at = 0.0
        self._probe = WriteProbe(self._write_probe_row)
        self._lanes = [GroupCommit(backend.write, may_retry=backend.may_retry) for _ in range(backend.lanes)]
        self._ordered_lanes = self._lanes[:-1] or self._lanes

    @property
    def integrity(self) -> IntegrityState | None:
        """The result of the check for damage to SQLite's file; None on PostgreSQL, which verifies its own pages."""
        return self._backend.integrity.state if self._backend.integrity is not None else None

    async def check_integrity(self, *, patience_seconds: float) -> None:
        """Start the check of the file and wait for it at most this long; it continues in the background.

        Raise StoreDamaged if damage was found by then. Once damage is found, every later call raises StoreDamaged.
        """
        integrity = self._backend.integrity
        if integrity is not None:
            integrity.begin()
            await asyncio.to_thread(integrity.wait, patience_seconds)
            integrity.raise_if_damaged()

    async def check_writable(self) -> None:
        """Return if a write would succeed now. Raise StoreUnavailable like `commit`, within about two seconds.

        Every readiness probe may call it: it writes one small row a second at most.
        """
        self._raise_if_damaged()
        await self._probe.check()
        self._raise_if_damaged()

    async def commit(self, work: Callable[[Connection], _Result], *, order_key: str | None = None) -> _Result:
        """Run `work` in a transaction and return its result once the transaction is committed.

        If `work` raises, nothing is changed and its exception is raised here. Cancelling the caller does not undo
        the transaction.

        `order_key` names the session that `work` changes, if it changes just one. Functions with the same key are
        committed in order of arrival. Those with other keys, and those without one, may run at the same time where
        the database supports it.

        Raise StoreUnavailable if the database cannot be reached or written (down, locked, disk full), StoreContended
        if every attempt failed on a conflict with other proxies, StoreDamaged once damage is known, and
        InvalidRequest for a value that the database cannot hold.
        """
        self._raise_if_damaged()
        try:
            return await self._lane(order_key).commit(work)
        except _DRIVER_ERRORS as error:
            self._raise_for_callers(error)

    async def read(self, work: Callable[[Connection], _Result]) -> _Result:
        """Run `work` in a read-only transaction, which sees a single committed state, and return its result.

        Raise StoreUnavailable like `commit`.
        """
        self._raise_if_damaged()
        try:
            result: _Result = await self._backend.read(work)
            return result
        except _DRIVER_ERRORS as error:
            self._raise_for_callers(error)

    async def scrub(self) -> bool:
        """Remove deleted and overwritten content from SQLite's files. Return False if a reader prevents it now.

        PostgreSQL removes such content itself, by its vacuum.
        """
        if self.url.get_backend_name() != "sqlite":
            return True
        self._raise_if_damaged()
        try:
            return await asyncio.to_thread(scrub, str(self.url.database))
        except sqlite3.DatabaseError as error:
            self._raise_if_damage(error)
            raise StoreUnavailable(f"the trajectory store cannot be used now: {error}") from error

    async def aclose(self) -> None:
        """Wait for the writes under way and close all connections."""
        for lane in self._lanes:
            await lane.aclose()
        await self._probe.aclose()
        self._backend.close()
        if self._backend.integrity is not None:
            self._backend.integrity.close()

    def _lane(self, order_key: str | None) -> GroupCommit:
        # Writes about no single session lock many rows. The last lane is theirs alone, so that a turn never shares a
        # transaction with a write that waits for such locks.
        if order_key is None:
            return self._lanes[-1]
        return self._ordered_lanes[hash(order_key) % len(self._ordered_lanes)]

    def _log_failure(self, error: DBAPIError) -> None:
        """Log the driver's own words, which name addresses and roles that agents must not see."""
        now = time.monotonic()
        if now >= self._log_again_at:
            self._log_again_at = now + _LOG_SECONDS
            with suppress(OSError):  # the log may be on the disk that is full: the caller gets its 503 all the same
                _LOG.warning("the store cannot be used", reason=" ".join(str(error.orig).split()))

    async def _write_probe_row(self) -> None:
        def write(connection: Connection) -> None:
            connection.execute(_PROBE, {"at": time.time()})

        await self.commit(write)

    def _raise_if_damaged(self) -> None:
        if self._backend.integrity is not None:
            self._backend.integrity.raise_if_damaged()

    def _raise_if_damage(self, error: BaseException | None) -> None:
        """Record the damage and raise StoreDamaged if the error reports a damaged file."""
        if self._backend.integrity is not None and is_damage(error):
            self._backend.integrity.report(str(error))
            self._backend.integrity.raise_if_damaged()

    def _raise_for_callers(self, error: _DriverError) -> NoReturn:
        """Raise the error of our own that stands for the driver's."""
        if isinstance(error, OverflowError | UnicodeEncodeError):  # raised by the driver as it binds a value
            reason = "a number is too large" if isinstance(error, OverflowError) else "a text is not valid Unicode"
            raise InvalidRequest(f"the trajectory store cannot hold a value of this request: {reason}") from error
        if isinstance(error, DBAPIError):
            self._raise_if_damage(error.orig)
        if self._backend.may_retry(error):
            raise StoreContended("other proxies are at the same in the trajectory store; try again") from error
        if isinstance(error, PoolExhausted):
            raise StoreUnavailable("the trajectory store is busy: all connections are in use") from error
        if error.connection_invalidated or isinstance(error, InterfaceError):
            raise StoreUnavailable("the connection to the trajectory store was lost") from error
        if isinstance(error, OperationalError) or self._backend.is_unavailable(error):
            self._log_failure(error)
            raise StoreUnavailable(
                f"the trajectory store cannot be used now: {self._backend.reason(error)}"
            ) from error
        if isinstance(error, DataError):
            reason = str(error.orig).partition("\n")[0]
            raise InvalidRequest(f"the trajectory store cannot hold a value of this request: {reason}") from error
        raise error


_PROBE = text("INSERT INTO write_probes (id, at) VALUES (1, :at) ON CONFLICT (id) DO UPDATE SET at = excluded.at")
