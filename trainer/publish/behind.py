"""Work that runs behind the training step: one piece at a time, on a thread of its own."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from contextvars import copy_context
from threading import Thread
from typing import Generic, TypeVar

_Value = TypeVar("_Value")


class Behind(Generic[_Value]):
    """A piece of work that has begun. Its thread is a daemon: a process that ends in the middle leaves the work
    unfinished, so work must be such that this loses nothing."""

    def __init__(self, work: Callable[[], _Value], name: str) -> None:
        self._outcome: Future[_Value] = Future()
        # The thread logs in the context of its creator, which names the run.
        context = copy_context()
        Thread(target=context.run, args=(self._run, work), name=name, daemon=True).start()

    @property
    def is_done(self) -> bool:
        return self._outcome.done()

    def result(self, timeout: float | None = None) -> _Value:
        """Wait for the end of the work and return its result, or raise its exception; TimeoutError after `timeout`
        seconds."""
        return self._outcome.result(timeout)

    def _run(self, work: Callable[[], _Value]) -> None:
        try:
            self._outcome.set_result(work())
        except BaseException as error:  # noqa: BLE001 - raised again where the result is asked for
            self._outcome.set_exception(error)
