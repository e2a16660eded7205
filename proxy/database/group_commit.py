"""Many small writes in one transaction: those that arrive while one is being committed share the next."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from sqlalchemy import Connection

from proxy.database.prepared import run_plain

_Result = TypeVar("_Result")

AT_ONCE = 64
"""Writes in one transaction. It bounds how long a write waits: for the transaction under way, and for one of these
for every 64 writes before it."""

Write = Callable[[Connection], _Result]
Transaction = Callable[[Callable[[Connection], Any]], Awaitable[Any]]


class GroupCommit:
    """Writes in the order of their arrival. `transaction` runs a function in a transaction and commits it."""

    def __init__(self, transaction: Transaction) -> None:
        self._transaction = transaction
        self._waiting: list[tuple[Write[Any], asyncio.Future[Any]]] = []
        self._committing: asyncio.Task[None] | None = None

    async def commit(self, write: Write[_Result]) -> _Result:
        """What `write` returned, once that is durable; or what it raised, and then it changed nothing.

        A caller that is cancelled does not undo the write. When the transaction cannot be begun or committed, all
        writes in it fail.
        """
        outcome: asyncio.Future[_Result] = asyncio.get_running_loop().create_future()
        self._waiting.append((write, outcome))
        if self._committing is None or self._committing.done():
            self._committing = asyncio.create_task(self._commit_all())
        return await outcome

    async def aclose(self) -> None:
        """Waits for what is being written."""
        if self._committing is not None:
            await self._committing

    async def _commit_all(self) -> None:
        while self._waiting:
            group, self._waiting = self._waiting[:AT_ONCE], self._waiting[AT_ONCE:]
            try:
                results = await self._transaction(_Group([write for write, _ in group]))
            except Exception as error:  # noqa: BLE001  (handed to the callers)
                results = [_Failure(error)] * len(group)
            for (_, outcome), result in zip(group, results, strict=True):
                if outcome.done():
                    continue
                if isinstance(result, _Failure):
                    outcome.set_exception(result.error)
                else:
                    outcome.set_result(result)


class _Failure:
    def __init__(self, error: Exception) -> None:
        self.error = error


class _Group:
    """Writes one after the other, each whole or not at all; their results, or how they failed."""

    def __init__(self, writes: Sequence[Write[Any]]) -> None:
        self._writes = writes

    def __call__(self, connection: Connection) -> list[Any]:
        if len(self._writes) == 1:
            return [self._writes[0](connection)]
        return [self._run(connection, write) for write in self._writes]

    def _run(self, connection: Connection, write: Write[Any]) -> Any:
        run_plain(connection, "SAVEPOINT write")
        try:
            result = write(connection)
        except Exception as error:  # noqa: BLE001  (handed to the caller)
            try:
                run_plain(connection, "ROLLBACK TO SAVEPOINT write")
            except Exception:  # noqa: BLE001  (the whole transaction is gone, for the first error's reason)
                raise error from None
            result = _Failure(error)
        run_plain(connection, "RELEASE SAVEPOINT write")
        return result
