"""How busy the engine is, as far as this process knows: by the generations that it has there itself."""

from __future__ import annotations

import asyncio
import secrets
import time

from proxy.clock import Clock
from proxy.contract.claim import EngineReading


class EngineActivity:
    """Seconds in which at least one generation was under way. `elapsed` is a clock that is never set back."""

    def __init__(self, elapsed: Clock = time.monotonic) -> None:
        self._elapsed = elapsed
        self._process = secrets.token_hex(8)
        self._began = elapsed()
        self._busy_before = 0.0
        self._busy_since = 0.0
        self._generations = 0

    def begin(self) -> None:
        if self._generations == 0:
            self._busy_since = self._elapsed()
        self._generations += 1

    def end(self) -> None:
        self._generations -= 1
        if self._generations == 0:
            self._busy_before += self._elapsed() - self._busy_since

    @property
    def generations(self) -> int:
        """Under way now."""
        return self._generations

    @property
    def busy_seconds(self) -> float:
        now = self._elapsed() - self._busy_since if self._generations else 0.0
        return self._busy_before + now

    def read(self) -> EngineReading:
        seconds = self._elapsed() - self._began
        return EngineReading(process=self._process, seconds=seconds, busy_seconds=self.busy_seconds)


class EngineSlots(asyncio.Semaphore):
    """So many generations at once; who holds a slot is at the engine."""

    def __init__(self, count: int, activity: EngineActivity) -> None:
        super().__init__(count)
        self._activity = activity

    async def __aenter__(self) -> None:
        await super().__aenter__()
        self._activity.begin()

    async def __aexit__(self, *raised: object) -> None:
        self._activity.end()
        self.release()
