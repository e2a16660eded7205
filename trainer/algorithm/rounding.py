"""Means and deviations that are exact for equal rewards, so that rounding never creates an advantage.

Adam divides a gradient by its own size, so an advantage of 1e-17 moves the weights as far as one of 1. In binary, the
mean of three times 0.1 is not 0.1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

# Relative error of a sum of some dozens of float64 numbers. A reward is such a sum of ledger entries.
_ROUNDING = 2.0**-46


def equal_but_for_rounding(values: Sequence[float]) -> bool:
    """Return whether all values are one number, as far as float64 sums can tell."""
    lowest, highest = min(values), max(values)
    return highest - lowest <= _ROUNDING * max(abs(lowest), abs(highest))


def mean_of(values: Sequence[float]) -> float:
    """Return the mean; of equal values exactly their value."""
    lowest = min(values)
    return lowest + math.fsum(value - lowest for value in values) / len(values)


def mean_square(values: Sequence[float], centre: float) -> float:
    """Return the mean of the squared deviations from `centre`."""
    return math.fsum(deviation(value, centre) ** 2 for value in values) / len(values)


def deviation(value: float, centre: float) -> float:
    """Return value − centre; exactly 0 where only rounding separates them."""
    return 0.0 if equal_but_for_rounding((value, centre)) else value - centre


def deviations(values: Sequence[float]) -> list[float]:
    """Return the deviations from the mean of the values; all exactly 0 where only rounding separates the values."""
    if equal_but_for_rounding(values):
        return [0.0] * len(values)
    mean = mean_of(values)
    return [deviation(value, mean) for value in values]
