"""Threads for what would hold the event loop: reading, rendering and tokenising large requests.

Threads share the interpreter's lock, so what runs here must not hold it for long in one C call: bounds on counts are
checked first, and long texts are worked on in pieces. Tokenising and hashing release the lock.
"""

from __future__ import annotations

import asyncio
import contextvars
import ctypes
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

_Result = TypeVar("_Result")

_TRIM_SECONDS = 1.0
"""How long after a large request memory is given back: its last references are gone by then, and requests that follow
each other share one trim, which takes some milliseconds."""


class Workers:
    """At most `threads` pieces of work at one time; others wait in order of arrival."""

    def __init__(self, threads: int) -> None:
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="large-request")
        self._trim: asyncio.TimerHandle | None = None

    async def run(self, work: Callable[[], _Result]) -> _Result:
        """The result of `work`, which sees the caller's context variables. Raises what it raises."""
        context = contextvars.copy_context()
        return await asyncio.get_running_loop().run_in_executor(self._threads, partial(context.run, work))

    def trim_soon(self) -> None:
        """Give freed memory back to the operating system, a second from now."""
        if self._trim is None:
            self._trim = asyncio.get_running_loop().call_later(_TRIM_SECONDS, self._start_trim)

    def close(self) -> None:
        """Stop the threads without waiting: what still runs has nobody who waits for it."""
        if self._trim is not None:
            self._trim.cancel()
            self._trim = None
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _start_trim(self) -> None:
        self._trim = None
        self._threads.submit(trim_memory)


def trim_memory() -> None:
    """Give freed memory back to the operating system, where the C library is glibc.

    glibc keeps what was freed below a block that is still used, and raises its threshold for blocks of their own to
    32 MiB: without this, one large request would leave its memory with the process for good.
    """
    if sys.platform != "linux":
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
