"""Mixtures of demonstrators' habits, from which the demonstrations of a warm start are drawn."""

from __future__ import annotations

import bisect
import itertools
import random
from collections.abc import Mapping
from enum import StrEnum
from typing import TypeVar

Habit = TypeVar("Habit", bound=StrEnum)


def draw_habits(rng: random.Random, mixture: Mapping[Habit, float], count: int) -> list[Habit]:
    """Return `count` habits, in the order of the mixture, in which the number of each follows its share to within
    one."""
    offset = rng.random()
    habits = list(mixture)
    ends = list(itertools.accumulate(mixture.values()))
    shares = [(index + offset) / count * ends[-1] for index in range(count)]
    return [habits[min(bisect.bisect_right(ends, share), len(habits) - 1)] for share in shares]
