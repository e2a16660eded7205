"""Measure how busy the engine is, by this process's own generations."""

from __future__ import annotations

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
