"""Time as a dependency: seconds since the epoch, UTC, so that tests can move it."""

from __future__ import annotations

import time
from collections.abc import Callable

Clock = Callable[[], float]


class SteadyClock:
    """The system's time, made monotonic, so that leases and time-outs keep their length.

    When the system's clock is set back, this one continues from its last value until the system's clock has caught
    up. When the system's clock is set forward, this one follows at once.
    """

    def __init__(self, wall: Clock = time.time, steady: Clock = time.monotonic) -> None:
        self._wall = wall
        self._steady = steady
        self._last, self._last_at = wall(), steady()

    def __call__(self) -> float:
        now, at = self._wall(), self._steady()
        steady = self._last + (at - self._last_at)
        self._last, self._last_at = now if now > steady else steady, at
        return self._last


system_clock: Clock = SteadyClock()
