"""Measure how busy the engine is, by this process's own generations."""

from __future__ import annotations

import asyncio
import secrets
import time

from proxy.clock import Clock
from proxy.contract.claim import EngineReading


class EngineActivity:
    """Counts the seconds with at least one running generation. `elapsed` is a monotonic clock."""

    def __init__(self, elapsed: Clock = time.monotonic) -> None:
        self._elapsed = elapsed
        self._process = secrets.token_hex(8)
        self._began = elapsed()
        self._busy_before = 0.0
        self._busy_since = 0.0
        self._generations = 0

    def begin(self) -> None:
        """Count a generation that starts."""
        if self._generations == 0:
            self._busy_since = self._elapsed()
        self._generations += 1

    def end(self) -> None:
        """Count a generation that ends."""
        self._generations -= 1
        if self._generations == 0:
            self._busy_before += self._elapsed() - self._busy_since

    @property
    def generations(self) -> int:
        """The number of generations that run now."""
        return self._generations

    @property
    def busy_seconds(self) -> float:
        """Seconds since the start of the process with at least one running generation."""
        now = self._elapsed() - self._busy_since if self._generations else 0.0
        return self._busy_before + now

    def read(self) -> EngineReading:
        """Return all figures at this moment."""
        seconds = self._elapsed() - self._began
        return EngineReading(process=self._process, seconds=seconds, busy_seconds=self.busy_seconds)


class EngineSlots(asyncio.Semaphore):
    """A semaphore for `count` generations at once. Only those within it count as active, not those that wait."""

    def __init__(self, count: int, activity: EngineActivity) -> None:
        super().__init__(count)
        self._activity = activity

    async def __aenter__(self) -> None:
        await self.acquire()
        self._activity.begin()

    async def __aexit__(self, *raised: object) -> None:
        self._activity.end()
        self.release()
