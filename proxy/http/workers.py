"""Threads for work that would block the event loop: parsing, rendering and tokenising large requests.

Threads share the interpreter's lock, so work must not hold it for long in one C call: it checks bounds on counts
first and processes long texts in pieces. Tokenising and hashing release the lock.
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

# Delay between a large request and the trim of memory. By then its last references are gone, and requests in quick
# succession share one trim, which takes some milliseconds.
_TRIM_SECONDS = 1.0


class Workers:
    """A pool of `threads` threads. Further work waits in order of arrival."""

    def __init__(self, threads: int) -> None:
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="large-request")
        self._trim: asyncio.TimerHandle | None = None

    async def run(self, work: Callable[[], _Result]) -> _Result:
        """Run `work` on a thread, with the caller's context variables. Return its result or raise its exception."""
        context = contextvars.copy_context()
        return await asyncio.get_running_loop().run_in_executor(self._threads, partial(context.run, work))

    def trim_soon(self) -> None:
        """Schedule a trim of memory in a second, unless one is scheduled."""
        if self._trim is None:
            self._trim = asyncio.get_running_loop().call_later(_TRIM_SECONDS, self._start_trim)

    def close(self) -> None:
        """Stop the threads without waiting for work in progress: no request is left to use its result."""
        if self._trim is not None:
            self._trim.cancel()
            self._trim = None
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _start_trim(self) -> None:
        self._trim = None
        self._threads.submit(trim_memory)


def trim_memory() -> None:
    """Return freed memory to the operating system, if the C library is glibc; do nothing otherwise.

    glibc keeps freed memory below a block that is in use, and raises the size from which blocks are mapped on their
    own to 32 MiB. Without a trim, the process would keep the memory of its largest request for good.
    """
    if sys.platform != "linux":
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # musl has none
    if trim is not None:
        trim(0)
