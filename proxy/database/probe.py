"""A probe that tells whether the store accepts writes now, by making a small one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from proxy.errors import StoreUnavailable

# How long a result is reused: the store sees one write a second, however many readiness probes arrive.
FRESH_SECONDS = 1.0

# The store is not ready if a write takes longer than this. Kubernetes probes time out after a second or so.
PATIENCE_SECONDS = 2.0


class WriteProbe:
    """Makes one write at a time, so that callers do not queue behind a lock that another program holds."""

    def __init__(
        self,
        write: Callable[[], Awaitable[None]],
        *,
        patience_seconds: float = PATIENCE_SECONDS,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._write = write
        self._patience = patience_seconds
        self._now = now
        self._under_way: asyncio.Task[None] | None = None
        self._begun_at = 0.0
        self._finished_at: float | None = None
        self._failure: StoreUnavailable | None = None

    async def check(self) -> None:
        """Return if a write succeeded within the last second. Raise StoreUnavailable if it failed or still waits."""
        if self._under_way is None and not self._is_fresh():
            self._begun_at = self._now()
            self._under_way = asyncio.create_task(self._run(), name="store-probe")
        task = self._under_way
        if task is not None:
            left = self._patience - (self._now() - self._begun_at)
            await asyncio.wait((task,), timeout=max(0.0, left))
            if task.done():
                task.result()
        if self._under_way is not None:
            raise StoreUnavailable(
                f"a write to the trajectory store has been waiting for {self._now() - self._begun_at:.1f} s: another "
                "program holds its lock, or the disk or the server hangs"
            )
        if self._failure is not None:
            raise type(self._failure)(self._failure.message, retry_after=self._failure.retry_after)

    async def aclose(self) -> None:
        """Wait for the write under way."""
        if self._under_way is not None:
            await asyncio.wait((self._under_way,))

    def _is_fresh(self) -> bool:
        return self._finished_at is not None and self._now() - self._finished_at < FRESH_SECONDS

    async def _run(self) -> None:
        try:
            await self._write()
            self._failure = None
        except StoreUnavailable as error:
            self._failure = error
        finally:
            self._finished_at = self._now()
            self._under_way = None
