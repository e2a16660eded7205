"""Many small writes in one transaction: those that arrive while one is being committed share the next."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from sqlalchemy.ext.asyncio import AsyncConnection

from proxy.database.unit_of_work import Database

_Result = TypeVar("_Result")

_AT_ONCE = 64

Write = Callable[[AsyncConnection], Awaitable[_Result]]


class GroupCommit(Generic[_Result]):
    """Writes of one kind, in the order of their arrival. A write may be run twice, its first run rolled back."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._waiting: list[tuple[Write[_Result], asyncio.Future[_Result]]] = []
        self._committing: asyncio.Task[None] | None = None

    async def commit(self, write: Write[_Result]) -> _Result:
        """What `write` returned, once that is durable; or what it raised, and then it changed nothing.

        A caller that is cancelled does not undo the write.
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
            group, self._waiting = self._waiting[:_AT_ONCE], self._waiting[_AT_ONCE:]
            try:
                await self._commit_group(group)
            except Exception:  # noqa: BLE001  (whose it is shows when each is written alone)
                for one in group:
                    await self._commit_alone(one)

    async def _commit_group(self, group: list[tuple[Write[_Result], asyncio.Future[_Result]]]) -> None:
        async with self._database.write() as connection:
            results = [await write(connection) for write, _ in group]
        for (_, outcome), result in zip(group, results, strict=True):
            if not outcome.done():
                outcome.set_result(result)

    async def _commit_alone(self, one: tuple[Write[_Result], asyncio.Future[_Result]]) -> None:
        try:
            await self._commit_group([one])
        except Exception as error:  # noqa: BLE001  (handed to the caller)
            if not one[1].done():
                one[1].set_exception(error)
