"""Database work on threads with connections of their own that stay open."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, TypeVar

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DBAPIError

from proxy.database.prepared import run_plain

_LONG_SECONDS = 0.5
_NOT_ASKED_SECONDS = 1.0

_Result = TypeVar("_Result")

_Job = tuple[Callable[[Connection], Any], asyncio.AbstractEventLoop, "asyncio.Future[Any]"]


class ConnectionThreads:
    """Runs functions of a connection, each in a transaction that starts with `begin`, on up to `count` threads, which
    start when they are needed. Half the cost of the standard library's executor, which serves more purposes.

    The driver must begin no transaction by itself. `is_lost` says whether a connection is of no use any more: it is
    replaced, and where that is found out before anything was done on it, nobody notices. `committed` is told of every
    transaction on its thread, before who asked for it.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        begin: str,
        count: int,
        name: str,
        is_lost: Callable[[Connection], bool],
        committed: Callable[[Connection], None] | None = None,
    ) -> None:
        self._engine = engine
        self._begin = begin
        self.count = count
        self._name = name
        self._is_lost = is_lost
        self._committed = committed
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._under_way = 0
        self._failure: tuple[DBAPIError, float] | None = None
        self._threads: list[threading.Thread] = []

    def run(self, work: Callable[[Connection], _Result]) -> asyncio.Future[_Result]:
        """What `work` returned, once its transaction is committed; rolled back if it raises. Cancelling the future
        changes nothing of that."""
        loop = asyncio.get_running_loop()
        outcome: asyncio.Future[_Result] = loop.create_future()
        self._under_way += 1
        outcome.add_done_callback(self._done)
        if len(self._threads) < min(self._under_way, self.count):
            self._start()
        self._jobs.put((work, loop, outcome))
        return outcome

    def close(self) -> None:
        """Waits for what was asked of it."""
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()
        self._threads.clear()
        self._engine.dispose()

    def _done(self, _outcome: asyncio.Future[Any]) -> None:
        self._under_way -= 1

    def _start(self) -> None:
        thread = threading.Thread(target=self._serve, name=f"{self._name}-{len(self._threads)}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _serve(self) -> None:
        connection: Connection | None = None
        try:
            while (job := self._jobs.get()) is not None:
                work, loop, outcome = job
                tell: Callable[[Any], None]
                try:
                    connection = self._begun(connection)
                    told, tell = self._in_transaction(connection, work), outcome.set_result
                except BaseException as error:  # noqa: BLE001  (handed to the caller)
                    told, tell = error, outcome.set_exception
                    connection = self._usable(connection)
                with suppress(RuntimeError):  # the loop was closed meanwhile: nobody waits
                    loop.call_soon_threadsafe(_tell, outcome, tell, told)
                del job, work, outcome, tell, told  # what a thread waits with, it does not keep
        finally:
            if connection is not None:
                _give_up(connection)

    def _begun(self, connection: Connection | None) -> Connection:
        """A connection with a transaction begun: a new one, where the old one was lost since it was last used."""
        # Not SQLAlchemy's `begin`, which costs a third of what a turn's statements do. It begins one of its own all
        # the same where `work` uses its `execute`: in its mind only, as nothing in the driver begins by itself.
        if connection is not None:
            try:
                run_plain(connection, self._begin)
            except DBAPIError:
                if not self._is_lost(connection):
                    raise
                _give_up(connection)
            else:
                return connection
        connection = self._connected()
        try:
            run_plain(connection, self._begin)
        except BaseException:
            _give_up(connection)
            raise
        return connection

    def _connected(self) -> Connection:
        """A new connection. After one that was waited for in vain, and not refused, the next work does not wait."""
        begun = time.monotonic()
        if self._failure is not None and begun < self._failure[1]:
            raise self._failure[0]
        try:
            return self._engine.connect()
        except DBAPIError as error:
            failed = time.monotonic()
            self._failure = (error, failed + _NOT_ASKED_SECONDS) if failed - begun > _LONG_SECONDS else None
            raise

    def _in_transaction(self, connection: Connection, work: Callable[[Connection], _Result]) -> _Result:
        try:
            result = work(connection)
            run_plain(connection, "COMMIT")
            if self._committed is not None:
                self._committed(connection)
        finally:
            if not self._is_lost(connection):
                connection.connection.rollback()  # nothing to do after the commit
                connection.rollback()
        return result

    def _usable(self, connection: Connection | None) -> Connection | None:
        if connection is None or not self._is_lost(connection):
            return connection
        _give_up(connection)
        return None


def _give_up(connection: Connection) -> None:
    """A connection that broke may refuse to be closed as well."""
    with suppress(Exception):
        connection.close()
    with suppress(Exception):
        connection.invalidate()


def _tell(outcome: asyncio.Future[Any], tell: Callable[[Any], None], told: Any) -> None:
    if not outcome.done():
        tell(told)
