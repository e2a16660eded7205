"""SQLite from a thread that writes and a few that read, with connections of their own that stay open."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from sqlalchemy import Connection, Engine

from proxy.database.prepared import run_plain

_Result = TypeVar("_Result")


class ConnectionThreads:
    """Runs functions of a connection, each in a transaction that starts with `begin`, on `count` threads. Nothing
    is started before the first."""

    def __init__(self, engine: Engine, *, begin: str, count: int, name: str) -> None:
        self._engine = engine
        self._begin = begin
        self._threads = ThreadPoolExecutor(count, thread_name_prefix=name)
        self._of_this_thread = threading.local()
        self._connections: list[Connection] = []

    async def run(self, work: Callable[[Connection], _Result]) -> _Result:
        """What `work` returned, once its transaction is committed; rolled back if it raises."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._in_transaction, work)

    def close(self) -> None:
        """Waits for what is running."""
        self._threads.shutdown()
        for connection in self._connections:
            connection.close()
        self._engine.dispose()

    def _in_transaction(self, work: Callable[[Connection], _Result]) -> _Result:
        connection: Connection | None = getattr(self._of_this_thread, "connection", None)
        if connection is None:
            connection = self._of_this_thread.connection = self._engine.connect()
            self._connections.append(connection)
        # Not SQLAlchemy's `begin`, which costs a third of what a turn's statements do. It begins one of its own all
        # the same where `work` uses its `execute`: in its mind only, as nothing in the driver begins by itself.
        run_plain(connection, self._begin)
        try:
            result = work(connection)
            run_plain(connection, "COMMIT")
        finally:
            connection.connection.rollback()  # nothing to do after the commit
            connection.rollback()
        return result
