"""Group commit: writes that arrive while a transaction is being committed share the next one.

Each write is applied whole or not at all. Writes of a `Together` kind run as one. Writes rarely fail, so a group
first runs without savepoints; if one write fails, the transaction is rolled back and the group runs again with a
savepoint before each write, so that only the failing one is lost.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Generic, Self, TypeVar

import msgspec
from sqlalchemy import Connection

from proxy.database.prepared import run_plain

_Result = TypeVar("_Result")

# The largest number of writes in one transaction. A write waits for the transaction under way, and for one more for
# every 64 writes queued before it.
AT_ONCE = 64

# The number of transactions that use savepoints from the start after a write failed. A client that sends only faulty
# writes would otherwise make every group run twice.
CAREFUL = 64

# The number of times a write is started in all, if conflicts with other proxies make it fail.
ATTEMPTS = 5

Write = Callable[[Connection], _Result]


class Together(ABC, Generic[_Result]):
    """A write of a kind that is cheaper to run as a batch."""

    @abstractmethod
    def __call__(self, connection: Connection) -> _Result:
        """Run this write alone."""

    @classmethod
    @abstractmethod
    def together(cls, connection: Connection, writes: Sequence[Self]) -> Sequence[_Result]:
        """Run all writes as one and return their results in order.

        Raise any exception if one of them would fail, whatever was written so far: the caller rolls all of them back
        and runs each alone.
        """


Transaction = Callable[[Callable[[Connection], Any]], "asyncio.Future[Any]"]


class _Waiting(msgspec.Struct):
    """A queued write, the future of its caller, and the number of times it was started."""

    write: Write[Any]
    outcome: asyncio.Future[Any]
    attempts: int = 0


class GroupCommit:
    """Runs writes in order of arrival, one transaction at a time.

    `transaction` runs a function in a transaction and commits it. `may_retry` returns whether a write that failed
    with the error, and so changed nothing, may succeed if it runs again.
    """

    def __init__(self, transaction: Transaction, *, may_retry: Callable[[BaseException], bool]) -> None:
        self._transaction = transaction
        self._may_retry = may_retry
        self._waiting: list[_Waiting] = []
        self._group: list[_Waiting] = []
        self._under_way: asyncio.Future[Any] | None = None
        self._careful = 0
        self._scheduled = False

    def commit(self, write: Write[_Result]) -> asyncio.Future[_Result]:
        """Return a future: the result of `write` once it is durable, or its exception after it changed nothing.

        `write` may run several times, and one of the runs is committed, so it must change nothing but the database.
        In a group, `Together` kinds run first; other writes keep their order. A write that may be retried runs up to
        `ATTEMPTS` times, ahead of writes that have not started. If the transaction cannot start or commit, all of its
        writes fail. Cancelling the future does not undo the write.
        """
        loop = asyncio.get_running_loop()
        outcome: asyncio.Future[_Result] = loop.create_future()
        self._waiting.append(_Waiting(write, outcome))
        if not self._scheduled and self._under_way is None:
            self._scheduled = True
            # Not started at once: other writes of this iteration of the loop then share the transaction.
            loop.call_soon(self._begin)
        return outcome

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
        retries = [one for one, result in zip(group, results, strict=True) if not self._resolve(one, result)]
        self._waiting[:0] = retries  # first, or newer writes could overtake them without end
        self._begin()

    def _resolve(self, waiting: _Waiting, result: Any) -> bool:
        """Pass the result to the caller. Return False instead if the write must run again, even if its caller was
        cancelled."""
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
    """One of several writes failed, and the transaction was rolled back."""


class _Group(msgspec.Struct, frozen=True):
    """The work of one transaction: runs the writes and returns their results, a `_Failure` for each that failed.

    Without `each_alone`, raises _OneFailed when one of several writes fails.
    """

    writes: Sequence[Write[Any]]
    each_alone: bool

    def __call__(self, connection: Connection) -> list[Any]:
        if len(self.writes) == 1:
            return [self.writes[0](connection)]
        if self.each_alone:
            return [self._run(connection, write) for write in self.writes]
        try:
            return self._run_all(connection)
        except Exception as error:
            raise _OneFailed from error

    def _run_all(self, connection: Connection) -> list[Any]:
        results: dict[int, Any] = {}
        alike: dict[type[Together[Any]], dict[int, Together[Any]]] = {}
        for place, write in enumerate(self.writes):
            if isinstance(write, Together):
                alike.setdefault(type(write), {})[place] = write
        for kind, writes in alike.items():
            results.update(zip(writes, kind.together(connection, list(writes.values())), strict=True))
        for place, write in enumerate(self.writes):
            if place not in results:
                results[place] = write(connection)
        return [results[place] for place in range(len(self.writes))]

    def _run(self, connection: Connection, write: Write[Any]) -> Any:
        run_plain(connection, "SAVEPOINT write")
        try:
            result = write(connection)
        except Exception as error:  # noqa: BLE001  (raised in the caller)
            try:
                run_plain(connection, "ROLLBACK TO SAVEPOINT write")
            except Exception:  # noqa: BLE001  (the whole transaction failed; the first error has the reason)
                raise error from None
            result = _Failure(error)
        run_plain(connection, "RELEASE SAVEPOINT write")
        return result
