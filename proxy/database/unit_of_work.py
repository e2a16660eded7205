"""One transaction, and the ways to open it: for changes or for a consistent look, as a function or as a block.

A function of a connection (`transact`, `look`) runs in one go, on a thread that keeps its connection: one hop, where
an async driver makes several for each statement, and functions that write and arrive together share a transaction. It
is the way of what a model call waits for. A block (`write`, `read`) may wait for other things in between; it is for
everything else.

SQLite has one writer at a time, so writes queue here, in order and without lock errors, instead of in SQLite's busy
handler, and start with BEGIN IMMEDIATE. On PostgreSQL other proxies write meanwhile: what gets in each other's way
there (deadlocks, two inserts of one name) is run again, a function of itself, a method with a `write` block where it
is `retried`. So it may run several times before its transaction commits once.
"""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext, suppress
from functools import wraps
from typing import NoReturn, ParamSpec, TypeVar

from sqlalchemy import Connection, make_url, text
from sqlalchemy.exc import DataError, DBAPIError, InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolExhausted
from sqlalchemy.ext.asyncio import AsyncConnection

from proxy.database.backend import Backend
from proxy.database.group_commit import ATTEMPTS, GroupCommit
from proxy.database.integrity import IntegrityState, is_damage
from proxy.database.postgresql import open_postgresql
from proxy.database.probe import WriteProbe
from proxy.database.sqlite import open_sqlite, scrub
from proxy.errors import InvalidRequest, StoreContended, StoreUnavailable
from proxy.log import logger
from proxy.settings import DEFAULT_CONNECTIONS

_LOG_SECONDS = 10.0
"""Between two lines about a store that cannot be used."""

_LOG = logger(__name__)

_Result = TypeVar("_Result")
_DriverError = DBAPIError | PoolExhausted | OverflowError | UnicodeEncodeError
_DRIVER_ERRORS = (DBAPIError, PoolExhausted, OverflowError, UnicodeEncodeError)
_Parameters = ParamSpec("_Parameters")


def retried(method: Callable[_Parameters, Awaitable[_Result]]) -> Callable[_Parameters, Awaitable[_Result]]:
    """For a method with one `write` block and nothing before it that must not be done twice: it is run again where
    other proxies got in the way of the block, a few times at most."""

    @wraps(method)
    async def run(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result:
        for _ in range(ATTEMPTS - 1):
            with suppress(StoreContended):
                return await method(*args, **kwargs)
        return await method(*args, **kwargs)

    return run


class Database:
    """The store's connections. `url` names SQLite or PostgreSQL, with any driver or none."""

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
        self._lanes = [
            GroupCommit(backend.transaction, may_do_again=backend.may_do_again) for _ in range(backend.lanes)
        ]
        self._session_lanes = self._lanes[:-1] or self._lanes
        self._sole_writer: Callable[[], AbstractAsyncContextManager[None]] = (
            self._lanes[0].held if backend.one_writer else nullcontext
        )

    @property
    def integrity(self) -> IntegrityState | None:
        """What is known of damage to the store's file; None on PostgreSQL, which checks its own pages."""
        return self._backend.integrity.state if self._backend.integrity is not None else None

    async def check_integrity(self, *, patience_seconds: float) -> None:
        """Begin to look for damage and wait for the result this long; a larger file is checked on in the background.

        Raises StoreDamaged if damage was found by then; calls that come after it was found raise it themselves.
        """
        integrity = self._backend.integrity
        if integrity is not None:
            integrity.begin()
            await asyncio.to_thread(integrity.wait, patience_seconds)
            integrity.raise_if_damaged()

    async def check_writable(self) -> None:
        """Return if a write would succeed now; raises StoreUnavailable like `transact`, within about two seconds.

        Cheap enough to be asked by every probe: at most one small write a second is made.
        """
        self._raise_if_damaged()
        await self._probe.check()
        self._raise_if_damaged()

    async def transact(self, work: Callable[[Connection], _Result], *, about: str | None = None) -> _Result:
        """What `work` returned, once what it wrote is committed; or what it raised, and then it changed nothing.

        It must only use its connection, and wait for nothing else. A caller that is cancelled does not undo it.
        `about`: what names the session that it changes, where it changes one. Writes about the same are made in the
        order of their arrival; where the database can, those about others at the same time, and those about none.
        Raises StoreUnavailable when the database cannot be reached or written (down, locked, disk full), StoreDamaged
        once damage to it is known, and InvalidRequest for a value that the database cannot hold.
        """
        self._raise_if_damaged()
        try:
            return await self._lane(about).commit(work)
        except _DRIVER_ERRORS as error:
            self._raise_told(error)

    async def look(self, work: Callable[[Connection], _Result]) -> _Result:
        """What `work` read of one committed state. Raises StoreUnavailable like `transact`."""
        self._raise_if_damaged()
        try:
            result: _Result = await self._backend.look(work)
            return result
        except _DRIVER_ERRORS as error:
            self._raise_told(error)

    @asynccontextmanager
    async def write(self) -> AsyncIterator[AsyncConnection]:
        """A transaction that commits at the end of the block and rolls back on any exception.

        Nothing else is written meanwhile on SQLite: do not wait in it for what may take long, nor for `transact`.
        Raises StoreUnavailable like `transact`, and StoreContended where other proxies got in the way (`retried`).
        """
        self._raise_if_damaged()
        try:
            async with self._sole_writer(), self._backend.writer.begin() as connection:
                yield connection
        except _DRIVER_ERRORS as error:
            self._raise_told(error)

    @asynccontextmanager
    async def read(self) -> AsyncIterator[AsyncConnection]:
        """A read-only look at one committed state. Raises StoreUnavailable like `transact`."""
        self._raise_if_damaged()
        try:
            async with self._backend.reader.connect() as connection:
                yield connection
        except _DRIVER_ERRORS as error:
            self._raise_told(error)

    async def scrub(self) -> bool:
        """Rids the store's files of what was deleted or overwritten, as far as it is for us to do: PostgreSQL does it
        by itself, in time. False: not now, try again."""
        if self.url.get_backend_name() != "sqlite":
            return True
        self._raise_if_damaged()
        try:
            return await asyncio.to_thread(scrub, str(self.url.database))
        except sqlite3.DatabaseError as error:
            self._raise_if_damage(error)
            raise StoreUnavailable(f"the trajectory store cannot be used now: {error}") from error

    async def aclose(self) -> None:
        """Waits for what is being written."""
        for lane in self._lanes:
            await lane.aclose()
        await self._probe.aclose()
        await self._backend.aclose()

    def _lane(self, about: str | None) -> GroupCommit:
        """The last is for what is about no session, or many: such writes lock more than others, and share their
        transaction with none that waits for such a lock."""
        return self._lanes[-1] if about is None else self._session_lanes[hash(about) % len(self._session_lanes)]

    def _log_failure(self, error: DBAPIError) -> None:
        """Log what agents must not see: addresses and roles. Not for every call, as many fail alike."""
        now = time.monotonic()
        if now >= self._log_again_at:
            self._log_again_at = now + _LOG_SECONDS
            with suppress(OSError):  # the log may be on the disk that is full: the caller gets its 503 all the same
                _LOG.warning("the store cannot be used", reason=" ".join(str(error.orig).split()))

    async def _write_probe_row(self) -> None:
        def write(connection: Connection) -> None:
            connection.execute(_PROBE, {"at": time.time()})

        await self.transact(write)

    def _raise_if_damaged(self) -> None:
        if self._backend.integrity is not None:
            self._backend.integrity.raise_if_damaged()

    def _raise_if_damage(self, error: BaseException | None) -> None:
        """Remember the damage that this error tells of, if it does, and raise StoreDamaged."""
        if self._backend.integrity is not None and is_damage(error):
            self._backend.integrity.report(str(error))
            self._backend.integrity.raise_if_damaged()

    def _raise_told(self, error: _DriverError) -> NoReturn:
        """Raise the error that callers are to see in place of the driver's."""
        if isinstance(error, OverflowError | UnicodeEncodeError):  # raised by the driver as it binds a value
            reason = "a number is too large" if isinstance(error, OverflowError) else "a text is not valid Unicode"
            raise InvalidRequest(f"the trajectory store cannot hold a value of this request: {reason}") from error
        if isinstance(error, DBAPIError):
            self._raise_if_damage(error.orig)
        if self._backend.may_do_again(error):
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
