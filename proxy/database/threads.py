"""Threads that each keep a database connection and run functions on it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

import msgspec
from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolExhausted

from proxy.database.prepared import run_plain

# A failed connection attempt that took longer than this counts as timed out.
_SLOW_CONNECT_SECONDS = 0.5
# How long new work fails at once after a connection attempt timed out: waiting again would stall every call.
_FAIL_FAST_SECONDS = 1.0

# Pauses of one thread between attempts to connect to a server that has no free connection; doubled each time.
_FIRST_PAUSE_SECONDS = 0.05
_LONGEST_PAUSE_SECONDS = 1.0

_Result = TypeVar("_Result")

# Starts a transaction on a connection.
Begin = Callable[[Connection], None]


def begin_by(statement: str) -> Begin:
    return lambda connection: run_plain(connection, statement)


class _Job(msgspec.Struct, frozen=True):
    """A function to run, how its transaction starts, the caller's future, and the deadline for a connection."""

    work: Callable[[Connection], Any]
    begin: Begin
    loop: asyncio.AbstractEventLoop
    outcome: asyncio.Future[Any]
    deadline: float


class ConnectionThreads:
    """Runs functions of a connection, each in its own transaction, on up to `count` threads, started on demand.

    The driver must not start transactions by itself. `is_lost` returns whether a connection is unusable; it is then
    replaced, unnoticed by the caller if its transaction had not started. `committed` is called after each commit on
    the thread, before the caller sees the result.

    `is_full` returns whether an error means that the server has no free connection. The work then waits, for
    `patience_seconds` at most, for the first thread that has one. A connection that was idle for `idle_seconds` is
    closed, so that other programs can have it within the server's limit.
    """

    # concurrent.futures.ThreadPoolExecutor costs twice as much per job: it wraps every result in a second future.

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
        """Run `work` in a transaction that `begin` starts and return its result once committed.

        The transaction is rolled back if `work` raises. Cancelling the future does not stop it.
        """
        loop = asyncio.get_running_loop()
        outcome: asyncio.Future[_Result] = loop.create_future()
        self._under_way += 1
        threads = len(self._threads)
        if threads < self._under_way and threads < self.count:
            self._start()
        self._jobs.put(_Job(work, begin, loop, outcome, time.monotonic() + self._patience))
        return outcome

    def close(self) -> None:
        """Wait for the work under way and queued, then close all connections."""
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()
        self._threads.clear()
        self._engine.dispose()

    def _deliver(self, outcome: asyncio.Future[Any], deliver: Callable[[Any], None], result: Any) -> None:
        """Pass a result to its caller, on the event loop's thread."""
        self._under_way -= 1
        if not outcome.done():  # the caller may have been cancelled
            deliver(result)

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
                deliver: Callable[[Any], None]
                try:
                    connection = self._begun(connection, job.begin)
                    pause = _FIRST_PAUSE_SECONDS
                    result, deliver = self._in_transaction(connection, job.work), job.outcome.set_result
                except BaseException as error:  # noqa: BLE001  (raised in the caller)
                    connection = self._usable(connection)
                    if connection is None and self._is_full(error) and time.monotonic() < job.deadline:
                        self._jobs.put(job)  # back to the queue: a thread that has a connection may take it
                        time.sleep(pause)
                        pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
                        continue
                    if self._is_full(error):
                        error = PoolExhausted(str(error))
                    result, deliver = error, job.outcome.set_exception
                with suppress(RuntimeError):  # the loop was closed meanwhile, so nobody waits
                    job.loop.call_soon_threadsafe(self._deliver, job.outcome, deliver, result)
                del job, result, deliver  # an idle thread must not keep its last job's objects alive
        finally:
            if connection is not None:
                _give_up(connection)

    def _begun(self, connection: Connection | None, begin: Begin) -> Connection:
        """Return a connection with a transaction started: a new one if the old one was lost since its last use."""
        # SQLAlchemy's own `begin` costs a third of a turn's statements, so it is not used. If `work` calls `execute`,
        # SQLAlchemy records a transaction of its own; nothing reaches the database, as the driver starts none.
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
            timed_out = failed - begun > _SLOW_CONNECT_SECONDS and not self._is_full(error)
            self._failure = (error, failed + _FAIL_FAST_SECONDS) if timed_out else None
            raise

    def _in_transaction(self, connection: Connection, work: Callable[[Connection], _Result]) -> _Result:
        try:
            result = work(connection)
            run_plain(connection, "COMMIT")
            if self._committed is not None:
                self._committed(connection)
        except BaseException:
            if not self._is_lost(connection):
                connection.connection.rollback()
            raise
        finally:
            if connection.in_transaction() and not self._is_lost(connection):
                connection.rollback()  # SQLAlchemy's record of a transaction, which `execute` in `work` made
        return result

    def _usable(self, connection: Connection | None) -> Connection | None:
        if connection is None or not self._is_lost(connection):
            return connection
        _give_up(connection)
        return None


def _give_up(connection: Connection) -> None:
    """Close a connection. A broken one may fail to close, so errors are ignored."""
    with suppress(Exception):
        connection.close()
    with suppress(Exception):
        connection.invalidate()
