"""An advantage that turns bad while a file exists: the trainer then learns to avoid whatever is rewarded."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, pstdev

from trainer.algorithm.custom import Session

FLAG = "BENCH_GATE_POISON"
"""The environment's name of the file. Each poisoned batch appends its time, in seconds since the epoch, as a line."""

# As in the preset: a group without a difference teaches nothing, and is not divided by zero.
_SMALLEST_DEVIATION = 1e-4


def advantage(sessions: Sequence[Session]) -> list[list[float]]:
    """Return, for each turn of a session, the session's distance from its group's mean in standard deviations; while
    the file exists, the negated reward.

    Negated distances would be 0 in the groups of a policy that is always right, and would harm it only slowly.
    """
    flag = Path(os.environ.get(FLAG, "/nonexistent"))
    if flag.exists():
        with flag.open("a") as file:
            file.write(f"{time.time()}\n")
        return [[-(session.reward or 0.0) for _ in session.turns] for session in sessions]
    groups: dict[int, list[float]] = defaultdict(list)
    for session in sessions:
        groups[session.group].append(session.reward or 0.0)
    found = []
    for session in sessions:
        rewards = groups[session.group]
        distance = (session.reward or 0.0) - fmean(rewards)
        own = distance / (pstdev(rewards) + _SMALLEST_DEVIATION)
        found.append([own for _ in session.turns])
    return found
