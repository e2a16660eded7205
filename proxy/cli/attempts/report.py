"""The figures of attempts, as they are shown meanwhile and at the end."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterable
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from proxy.cli.attempts.journal import Finished
from proxy.cli.drawing import plain_table, sparkline

WINDOW = 128
"""First and last rewards are means over this many attempts."""

_CURVE_POINTS = 40
_PROBLEMS_SHOWN = 10


class Report:
    """Counts finished attempts."""

    def __init__(self, total: int | None, earlier: Iterable[Finished] = ()) -> None:
        """`total` is the number of attempts of the whole plan; None: it has no end. `earlier` ones are in the
        journal."""
        self._total = total
        self._rewards: list[float] = []
        self._by_task: dict[str, list[float]] = {}
        self._done: set[tuple[str, int]] = set()
        self._problems: Counter[str] = Counter()
        self._last_problem: dict[str, str] = {}
        self._recent: deque[float] = deque(maxlen=WINDOW)
        self._started = time.monotonic()
        for finished in earlier:
            if finished.problem is None:
                self.add(finished)

    @property
    def is_empty(self) -> bool:
        return not self._done and not self._problems

    @property
    def failed(self) -> int:
        return sum(self._problems.values())

    def add(self, finished: Finished) -> None:
        """Count an attempt."""
        if finished.problem is not None:
            self._problems[finished.task] += 1
            self._last_problem[finished.task] = finished.problem
            return
        self._done.add(finished.key)
        if finished.reward is not None:
            self._rewards.append(finished.reward)
            self._recent.append(finished.reward)
            self._by_task.setdefault(finished.task, []).append(finished.reward)

    def as_dict(self) -> dict[str, Any]:
        """Return the figures for programs. Means are None without a reward."""
        return {
            "attempts": len(self._done),
            "failed": self.failed,
            "rewarded": len(self._rewards),
            "mean_reward": _mean(self._rewards),
            "first_mean": _mean(self._rewards[:WINDOW]),
            "last_mean": _mean(self._recent),
            "window": WINDOW,
            "seconds": round(time.monotonic() - self._started, 3),
            "tasks": {task: {"attempts": len(own), "mean_reward": _mean(own)} for task, own in self._by_task.items()},
            "problems": dict(self._last_problem),
        }

    def line(self) -> str:
        """Return one line about the state of the attempts."""
        of = "" if self._total is None else f" of {self._total}"
        reward = _mean(self._recent)
        parts = [f"{len(self._done)}{of} attempts"]
        if reward is not None:
            low, high = min(0.0, *self._rewards), max(1.0, *self._rewards)
            curve = sparkline(self._rewards, low=low, high=high, width=_CURVE_POINTS)
            parts.append(f"reward {reward:.3f} (last {len(self._recent)}) {curve}")
        if self.failed:
            parts.append(f"{self.failed} failed")
        return "  ".join(parts)

    def summary(self) -> RenderableType:
        """Return the end: rewards first and last, the hardest tasks, and what failed."""
        parts: list[RenderableType] = [self.line()]
        if len(self._rewards) > WINDOW:
            first, last = _mean(self._rewards[:WINDOW]), _mean(self._recent)
            parts.append(f"mean reward of the first {WINDOW} attempts {first:.3f}, of the last {WINDOW} {last:.3f}")
        if 1 < len(self._by_task) <= WINDOW:
            parts.append(self._hardest())
        for task, problem in list(self._last_problem.items())[:_PROBLEMS_SHOWN]:
            count = self._problems[task]
            parts.append(Text(f"task {task}: {count} failed; the last: {problem}", style="red"))
        if len(self._last_problem) > _PROBLEMS_SHOWN:
            parts.append(Text(f"… and {len(self._last_problem) - _PROBLEMS_SHOWN} more tasks failed", style="red"))
        return Group(*parts)

    def _hardest(self) -> RenderableType:
        table = plain_table("lowest rewards", "attempts", "mean reward")
        means = sorted((sum(own) / len(own), task, len(own)) for task, own in self._by_task.items())
        for mean, task, count in means[:5]:
            table.add_row(task, str(count), f"{mean:.3f}")
        return table


def _mean(values: Iterable[float]) -> float | None:
    numbers = list(values)
    return sum(numbers) / len(numbers) if numbers else None
