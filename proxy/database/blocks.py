"""Blocks of several statements, with waits between them, on a thread of `ConnectionThreads`.

A block has a thread and its connection for itself until it ends. Its statements run there one after the other; rows
are read by the caller, as psycopg holds all rows of a result in memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar, cast

from sqlalchemy import Connection
from sqlalchemy.ext.asyncio import AsyncConnection

from proxy.database.threads import Begin, ConnectionThreads

_Result = TypeVar("_Result")

_Request = tuple[Callable[[Connection], Any], "asyncio.Future[Any]"]


class _RolledBack(Exception):
    """The block ended by an exception: nothing of it is committed."""


class _Statements:
    """The methods of `AsyncConnection` that blocks use."""

    def __init__(self, requests: SimpleQueue[_Request | _RolledBack | None], loop: asyncio.AbstractEventLoop) -> None:
        self._requests = requests
        self._loop = loop

    async def execute(self, statement: Any, parameters: Any = None) -> Any:
        return await self.run_sync(lambda connection: connection.execute(statement, parameters))

    async def exec_driver_sql(self, statement: str, parameters: Any = None) -> Any:
        return await self.run_sync(lambda connection: connection.exec_driver_sql(statement, parameters))

    async def run_sync(self, work: Callable[..., _Result], *args: Any, **kwargs: Any) -> _Result:
        outcome: asyncio.Future[_Result] = self._loop.create_future()
        self._requests.put((lambda connection: work(connection, *args, **kwargs), outcome))
        return await outcome


@asynccontextmanager
async def block(threads: ConnectionThreads, begin: Begin) -> AsyncIterator[AsyncConnection]:
    """A transaction that is committed at the end of the block and rolled back on any exception.

    Raises SQLAlchemy's errors, also where no connection can be had.
    """
    loop = asyncio.get_running_loop()
    begun: asyncio.Future[None] = loop.create_future()
    requests: SimpleQueue[_Request | _RolledBack | None] = SimpleQueue()
    ended = threads.run(partial(_serve, requests, loop, begun), begin)
    ended.add_done_callback(_retrieve)
    try:
        await asyncio.wait((begun, ended), return_when=asyncio.FIRST_COMPLETED)
        if not begun.done():
            ended.result()
        yield cast("AsyncConnection", _Statements(requests, loop))
    except BaseException:
        requests.put(_RolledBack())
        raise
    requests.put(None)
    await ended


def _serve(
    requests: SimpleQueue[_Request | _RolledBack | None],
    loop: asyncio.AbstractEventLoop,
    begun: asyncio.Future[None],
    connection: Connection,
) -> None:
    """Run on the thread: statement by statement, until the block says how it ended."""
    _tell(loop, begun, None)
    while (request := requests.get()) is not None:
        if isinstance(request, _RolledBack):
            raise request
        work, outcome = request
        try:
            result = work(connection)
        except BaseException as error:  # noqa: BLE001  (handed to the block, which ends or goes on)
            _tell(loop, outcome, error, failed=True)
        else:
            _tell(loop, outcome, result)


def _tell(
    loop: asyncio.AbstractEventLoop, outcome: asyncio.Future[Any], result: Any, *, failed: bool = False
) -> None:
    def tell() -> None:
        if not outcome.done():
            (outcome.set_exception if failed else outcome.set_result)(result)

    with suppress(RuntimeError):  # the loop was closed meanwhile: nobody waits
        loop.call_soon_threadsafe(tell)


def _retrieve(ended: asyncio.Future[Any]) -> None:
    """A block that failed has raised its own error; asyncio need not complain about the transaction's."""
    if not ended.cancelled():
        ended.exception()
