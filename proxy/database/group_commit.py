"""Many small writes in one transaction: those that arrive while one is being committed share the next.

Each is whole or not at all. Those of a kind that knows how to (`Together`) are made at once. As they mostly succeed,
they run with nothing between them; when one fails, the transaction is undone and the same writes run again with a
savepoint before each, so that it fails alone.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Self, TypeVar

from sqlalchemy import Connection

from proxy.database.prepared import run_plain

_Result = TypeVar("_Result")

AT_ONCE = 64
"""Writes in one transaction. It bounds how long a write waits: for the transaction under way, and for one of these
for every 64 writes before it."""

CAREFUL = 64
"""Transactions with savepoints after a write failed. Where many fail, few are run in vain."""

ATTEMPTS = 5
"""How often a write is begun that others get in the way of."""

Write = Callable[[Connection], _Result]


class Together(ABC, Generic[_Result]):
    """A write of a kind of which many at once cost less than one after the other."""

    @abstractmethod
    def __call__(self, connection: Connection) -> _Result:
        """Writes it alone."""

    @classmethod
    @abstractmethod
    def together(cls, connection: Connection, writes: Sequence[Self]) -> Sequence[_Result]:
        """Writes them all and returns what each alone would, in their order. Where one would fail, or this cannot
        tell, it raises, whatever was written: all are undone, and each is written alone."""


Transaction = Callable[[Callable[[Connection], Any]], "asyncio.Future[Any]"]


@dataclass
class _Waiting:
    """A write, who waits for it, and how often it was begun."""

    write: Write[Any]
    outcome: asyncio.Future[Any]
    attempts: int = 0


class GroupCommit:
    """Writes in the order of their arrival, one transaction at a time. `transaction` runs a function in a transaction
    and commits it. `may_retry` says of an error whether the write that failed by it, and so changed nothing, may
    succeed when it is run once more."""

    def __init__(self, transaction: Transaction, *, may_retry: Callable[[BaseException], bool]) -> None:
        self._transaction = transaction
        self._may_retry = may_retry
        self._waiting: list[_Waiting] = []
        self._group: list[_Waiting] = []
        self._under_way: asyncio.Future[Any] | None = None
        self._careful = 0
        self._scheduled = False

    async def commit(self, write: Write[_Result]) -> _Result:
        """What `write` returned, once that is durable; or what it raised, and then it changed nothing.

        Of writes that wait at the same time, those of one `Together` kind are made first; else they keep their order.
        `write` may be run several times, of which one is committed: it must change nothing but the database. What may
        be done again is, up to `ATTEMPTS` times in all, before what has not been begun. A caller that is cancelled
        does not undo the write. When the transaction cannot be begun or committed, all writes in it fail.
        """
        loop = asyncio.get_running_loop()
        outcome: asyncio.Future[_Result] = loop.create_future()
        self._waiting.append(_Waiting(write, outcome))
        if not self._scheduled and self._under_way is None:
            self._scheduled = True
            loop.call_soon(self._begin)  # what else this round of the loop brings shares the transaction
        return await outcome

    async def aclose(self) -> None:
        """Wait until every write that was asked for has ended."""
        while self._waiting or self._under_way is not None:
            self._begin()
            # Every transaction starts the next one as it finishes: one whose write failed is followed by another try.
            if self._under_way is not None:
                await asyncio.wait((self._under_way,))

    def _begin(self) -> None:
        self._scheduled = False
        if self._under_way is not None or not self._waiting:
            return
        self._group, self._waiting = self._waiting[:AT_ONCE], self._waiting[AT_ONCE:]
        self._run()

    def _run(self) -> None:
        each_alone = self._careful > 0
        self._careful -= each_alone
        self._under_way = self._transaction(_Group([waiting.write for waiting in self._group], each_alone=each_alone))
        self._under_way.add_done_callback(self._finish)

    def _finish(self, transaction: asyncio.Future[Any]) -> None:
        failure: BaseException | None = (
            asyncio.CancelledError() if transaction.cancelled() else transaction.exception()
        )
        if isinstance(failure, _OneFailed):
            self._careful = CAREFUL
            self._run()
            return
        self._under_way = None
        group, self._group = self._group, []
        results = [_Failure(failure)] * len(group) if failure is not None else transaction.result()
        again = [one for one, result in zip(group, results, strict=True) if not self._is_told(one, result)]
        self._waiting[:0] = again
        self._begin()

    def _is_told(self, waiting: _Waiting, result: Any) -> bool:
        """Tells its caller; unless the write is to be run once more, whether anybody still waits for it or not."""
        waiting.attempts += 1
        failure = result.error if isinstance(result, _Failure) else None
        if failure is not None and waiting.attempts < ATTEMPTS and self._may_retry(failure):
            return False
        outcome = waiting.outcome
        if outcome.done():
            return True
        if failure is None:
            outcome.set_result(result)
        elif isinstance(failure, asyncio.CancelledError):
            outcome.cancel()
        else:
            outcome.set_exception(failure)
        return True


class _Failure:
    def __init__(self, error: BaseException) -> None:
        self.error = error


class _OneFailed(Exception):
    """One of several writes failed, and nothing of any of them was committed."""


class _Group:
    """Writes one after the other, each whole or not at all; their results, or how they failed. Unless `each_alone`,
    raises _OneFailed when one of several fails."""

    def __init__(self, writes: Sequence[Write[Any]], *, each_alone: bool) -> None:
        self._writes = writes
        self._each_alone = each_alone

    def __call__(self, connection: Connection) -> list[Any]:
        if len(self._writes) == 1:
            return [self._writes[0](connection)]
        if self._each_alone:
            return [self._run(connection, write) for write in self._writes]
        try:
            return self._run_all(connection)
        except Exception as error:
            raise _OneFailed from error

    def _run_all(self, connection: Connection) -> list[Any]:
        results: dict[int, Any] = {}
        alike: dict[type[Together[Any]], dict[int, Together[Any]]] = {}
        for place, write in enumerate(self._writes):
            if isinstance(write, Together):
                alike.setdefault(type(write), {})[place] = write
        for kind, writes in alike.items():
            results.update(zip(writes, kind.together(connection, list(writes.values())), strict=True))
        for place, write in enumerate(self._writes):
            if place not in results:
                results[place] = write(connection)
        return [results[place] for place in range(len(self._writes))]

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
