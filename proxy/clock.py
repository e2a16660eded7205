"""Time as a dependency: seconds since the epoch, UTC, so that tests can move it."""

from __future__ import annotations

import time
from collections.abc import Callable

Clock = Callable[[], float]


class SteadyClock:
    """The system's time, made monotonic: after the system's clock is set back, this one continues from where it was
    until the system's has caught up, so that leases and time-outs keep their length. A clock set forward is followed.
    """

    def __init__(self, wall: Clock = time.time, steady: Clock = time.monotonic) -> None:
        self._wall = wall
        self._steady = steady
        self._last, self._last_at = wall(), steady()

    def __call__(self) -> float:
        now, at = self._wall(), self._steady()
        self._last, self._last_at = max(now, self._last + (at - self._last_at)), at
        return self._last


system_clock: Clock = SteadyClock()
