"""Database work on threads with connections of their own that stay open while they are used."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, TypeVar

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolExhausted

from proxy.database.prepared import run_plain

_LONG_SECONDS = 0.5
_NOT_ASKED_SECONDS = 1.0

_FIRST_PAUSE_SECONDS = 0.05
_LONGEST_PAUSE_SECONDS = 1.0
"""Between two attempts of one thread to get a connection from a server that has none to give."""

_Result = TypeVar("_Result")

Begin = Callable[[Connection], None]
"""Begins a transaction on a connection."""


def begin_by(statement: str) -> Begin:
    return lambda connection: run_plain(connection, statement)


class _Job(NamedTuple):
    """Work, how its transaction begins, who waits for it, and until when it waits for a connection."""

    work: Callable[[Connection], Any]
    begin: Begin
    loop: asyncio.AbstractEventLoop
    outcome: asyncio.Future[Any]
    deadline: float


class ConnectionThreads:
    """Runs functions of a connection, each in a transaction of its own, on up to `count` threads, which start when
    they are needed. Half the cost of the standard library's executor, which serves more purposes.

    The driver must begin no transaction by itself. `is_lost` says whether a connection is of no use any more: it is
    replaced, and where that is found out before anything was done on it, nobody notices. `committed` hears of every
    transaction on its thread, before whoever asked for it.

    `is_full` says of an error that the server has no connection to give. The work then waits, `patience_seconds` at
    most, and goes to whichever thread has a connection first. A connection that was idle for `idle_seconds` is
    closed, so that others who share the server's limit can have it.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        count: int,
        name: str,
        is_lost: Callable[[Connection], bool],
        committed: Callable[[Connection], None] | None = None,
        is_full: Callable[[BaseException], bool] = lambda _error: False,
        patience_seconds: float = 10.0,
        idle_seconds: float | None = None,
    ) -> None:
        self._engine = engine
        self.count = count
        self._name = name
        self._is_lost = is_lost
        self._committed = committed
        self._is_full = is_full
        self._patience = patience_seconds
        self._idle_seconds = idle_seconds
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._under_way = 0
        self._failure: tuple[DBAPIError, float] | None = None
        self._threads: list[threading.Thread] = []

    def run(self, work: Callable[[Connection], _Result], begin: Begin) -> asyncio.Future[_Result]:
        """Return what `work` returned, once its transaction is committed; it is rolled back if `work` raises.
        Cancelling the future changes nothing of that."""
        loop = asyncio.get_running_loop()
        outcome: asyncio.Future[_Result] = loop.create_future()
        self._under_way += 1
        outcome.add_done_callback(self._done)
        if len(self._threads) < min(self._under_way, self.count):
            self._start()
        self._jobs.put(_Job(work, begin, loop, outcome, time.monotonic() + self._patience))
        return outcome

    def close(self) -> None:
        """Wait for all work that was asked for."""
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
        pause = _FIRST_PAUSE_SECONDS
        try:
            while True:
                try:
                    job = self._jobs.get(timeout=self._idle_seconds if connection is not None else None)
                except Empty:
                    assert connection is not None
                    _give_up(connection)
                    connection = None
                    continue
                if job is None:
                    return
                tell: Callable[[Any], None]
                try:
                    connection = self._begun(connection, job.begin)
                    pause = _FIRST_PAUSE_SECONDS
                    result, tell = self._in_transaction(connection, job.work), job.outcome.set_result
                except BaseException as error:  # noqa: BLE001  (handed to the caller)
                    connection = self._usable(connection)
                    if connection is None and self._is_full(error) and time.monotonic() < job.deadline:
                        self._jobs.put(job)  # a thread that has a connection takes it meanwhile
                        time.sleep(pause)
                        pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
                        continue
                    if self._is_full(error):
                        error = PoolExhausted(str(error))
                    result, tell = error, job.outcome.set_exception
                with suppress(RuntimeError):  # the loop was closed meanwhile: nobody waits
                    job.loop.call_soon_threadsafe(_tell, job.outcome, tell, result)
                del job, result, tell  # an idle thread keeps nothing of its last job alive
        finally:
            if connection is not None:
                _give_up(connection)

    def _begun(self, connection: Connection | None, begin: Begin) -> Connection:
        """Return a connection with a transaction begun: a new one if the old one was lost since it was last used."""
        # Not SQLAlchemy's `begin`, which costs a third of what a turn's statements do. It begins one of its own all
        # the same where `work` uses its `execute`: in its mind only, as nothing in the driver begins by itself.
        if connection is not None:
            try:
                begin(connection)
            except DBAPIError:
                if not self._is_lost(connection):
                    raise
                _give_up(connection)
            else:
                return connection
        connection = self._connected()
        try:
            begin(connection)
        except BaseException:
            _give_up(connection)
            raise
        return connection

    def _connected(self) -> Connection:
        """Return a new connection. After an attempt that timed out, fail the next ones at once for one second."""
        begun = time.monotonic()
        if self._failure is not None and begun < self._failure[1]:
            raise self._failure[0]
        try:
            return self._engine.connect()
        except DBAPIError as error:
            failed = time.monotonic()
            timed_out = failed - begun > _LONG_SECONDS and not self._is_full(error)
            self._failure = (error, failed + _NOT_ASKED_SECONDS) if timed_out else None
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
    """Close a connection; one that broke may refuse even that."""
    with suppress(Exception):
        connection.close()
    with suppress(Exception):
        connection.invalidate()


def _tell(outcome: asyncio.Future[Any], tell: Callable[[Any], None], result: Any) -> None:
    if not outcome.done():
        tell(result)
