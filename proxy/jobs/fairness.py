"""Fairness between runs: whose job is next, pure."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence


def fair_order(waiting: Mapping[str, Sequence[str]], running: Mapping[str, int], want: int) -> list[str]:
    """Return up to `want` job ids: each time the first one of the run with the fewest jobs running or chosen so far.

    `waiting` maps a run to its due jobs in order, `running` to its number of running jobs. Among equals, the run that
    comes first in `waiting` is first: the caller rotates it.
    """
    queue = [(running.get(run, 0), place, run, 0) for place, (run, jobs) in enumerate(waiting.items()) if jobs]
    heapq.heapify(queue)
    chosen: list[str] = []
    while queue and len(chosen) < want:
        busy, place, run, index = heapq.heappop(queue)
        chosen.append(waiting[run][index])
        if index + 1 < len(waiting[run]):
            heapq.heappush(queue, (busy + 1, place, run, index + 1))
    return chosen


def rotated(runs: Sequence[str], after: str | None) -> list[str]:
    """Return the sorted `runs`, beginning with the first one behind `after` and ending with those up to it."""
    if after is None:
        return list(runs)
    return [run for run in runs if run > after] + [run for run in runs if run <= after]
