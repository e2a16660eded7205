"""Count what the harness observes, and write it to a file that others may read at any moment."""

from __future__ import annotations

import json
import os
import time
from collections import deque
from pathlib import Path
from typing import Any

WINDOW = 128
CURVE_STEP = 32
FULL_REWARD = 1.0
WRITE_INTERVAL_SECONDS = 0.5


class Progress:
    """The counts of a run. Rewards here are the earned ones, also if others were posted.

    `calls` are calls of the model in scored sessions. `first_mean` and `last_mean` cover the first and last 128
    scored sessions; `curve` has the mean of every 32.
    """

    def __init__(self, report: Path | None = None) -> None:
        self.sessions = 0
        self.reward_sum = 0.0
        self.calls = 0
        self.failed_calls = 0
        self.failed_sessions = 0
        self.cancelled_sessions = 0
        self.last_error: str | None = None
        self._first: list[float] = []
        self._last: deque[float] = deque(maxlen=WINDOW)
        self._block: list[float] = []
        self._curve: list[float] = []
        self._first_transcript: dict[str, Any] | None = None
        self._last_transcript: dict[str, Any] | None = None
        self._last_success_transcript: dict[str, Any] | None = None
        self._report = report
        self._started = time.monotonic()
        self._written = -WRITE_INTERVAL_SECONDS

    def scored(self, reward: float, calls: int, transcript: dict[str, Any]) -> None:
        """Count a session that ended and was scored."""
        self.sessions += 1
        self.reward_sum += reward
        self.calls += calls
        if len(self._first) < WINDOW:
            self._first.append(reward)
        self._last.append(reward)
        self._block.append(reward)
        if len(self._block) == CURVE_STEP:
            self._curve.append(sum(self._block) / CURVE_STEP)
            self._block.clear()
        self._first_transcript = self._first_transcript or transcript
        self._last_transcript = transcript
        if reward >= FULL_REWARD:
            self._last_success_transcript = transcript
        self.write()

    def failed_call(self, error: Exception) -> None:
        """Count a request of any kind that the server did not answer as it should."""
        self.failed_calls += 1
        self.last_error = f"{type(error).__name__}: {error}"
        self.write()

    def as_dict(self) -> dict[str, Any]:
        return {
            "sessions": self.sessions,
            "reward_sum": self.reward_sum,
            "first_mean": _mean(self._first),
            "last_mean": _mean(self._last),
            "window": WINDOW,
            "curve": [round(value, 4) for value in self._curve],
            "curve_step": CURVE_STEP,
            "calls": self.calls,
            "failed_calls": self.failed_calls,
            "failed_sessions": self.failed_sessions,
            "cancelled_sessions": self.cancelled_sessions,
            "last_error": self.last_error,
            "seconds": round(time.monotonic() - self._started, 3),
            "first_transcript": self._first_transcript,
            "last_transcript": self._last_transcript,
            "last_success_transcript": self._last_success_transcript,
        }

    def write(self, *, final: bool = False) -> None:
        """Replace the report atomically, so that a reader never sees half of it; at most twice a second until
        `final`."""
        now = time.monotonic()
        if self._report is None or (not final and now - self._written < WRITE_INTERVAL_SECONDS):
            return
        self._written = now
        temporary = self._report.with_name(f".{self._report.name}.{os.getpid()}")
        temporary.write_text(json.dumps(self.as_dict(), ensure_ascii=False, indent=1))
        temporary.replace(self._report)


def _mean(values: list[float] | deque[float]) -> float | None:
    return sum(values) / len(values) if values else None
