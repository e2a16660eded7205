"""Seconds per phase of a step."""

from __future__ import annotations

import time

from torch.profiler import record_function

WAITING, ELSEWHERE = "claim", "other_runs"
"""Phases in which the trainer waits for the run's trajectories, and in which it trains other runs."""


class PhaseClock:
    """Seconds per named phase. A profiler's trace shows each phase as a range of that name."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._phase: str | None = None
        self._began = 0.0
        self._range: record_function | None = None

    def begin(self, phase: str) -> None:
        """End the current phase and begin another."""
        self.end()
        self._phase, self._began = phase, time.perf_counter()
        self._range = record_function(phase)
        self._range.__enter__()  # type: ignore[no-untyped-call]

    def end(self) -> None:
        self._count()
        self._phase = None
        if self._range is not None:
            self._range.__exit__(None, None, None)
            self._range = None

    def add(self, phase: str, seconds: float) -> None:
        """Add seconds of a phase that the caller measured."""
        self._seconds[phase] = self._seconds.get(phase, 0.0) + seconds

    def take(self) -> dict[str, float]:
        """Return the seconds of all phases since the last `take`. The current phase goes on."""
        self._count()
        taken, self._seconds = self._seconds, {}
        return taken

    def _count(self) -> None:
        if self._phase is not None:
            now = time.perf_counter()
            self.add(self._phase, now - self._began)
            self._began = now
