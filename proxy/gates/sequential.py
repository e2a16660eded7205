"""Confidence sequences for means of bounded values: bounds that hold at all times at once. Pure.

A usual confidence interval is right with its stated probability if one looks once, at a number of values fixed
before. A confidence sequence is right with that probability at every number of values together, so one may look after
each value and stop when the answer is clear.

The bounds are those of betting (Waudby-Smith and Ramdas, "Estimating means of bounded random variables by betting",
JRSS B 2023). For every possible mean m, a player bets against "the mean is at most m". If that is true, the player's
capital is a supermartingale that begins at 1, so it ever reaches 1/α with probability at most α (Ville's inequality).
The lower bound is the largest m that the player has ruined.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]

# Means that are tested. Between two of them the bound is rounded outwards, so it stays valid.
_GRID = 201
# A bet risks at most this part of the capital: with all of it, one value would end the game.
_LARGEST_BET = 0.75
# Numbers of values at which a bound is best. One strategy for all of them would be half as good at each.
_HORIZONS = (24.0, 96.0, 384.0)
# Values whose capital is computed at once: bounds the memory to a few megabytes.
_BLOCK = 128


class Interval(NamedTuple):
    """A lower and an upper bound, each right at all times with probability 1 - `error` of its side."""

    low: float
    high: float


class Comparison(NamedTuple):
    """A comparison of two means: `mean` and its bounds are of the new one minus the old one.

    "new < old" is concluded from `high < 0`, and "new > old - d" from `low > -d`; each is wrong with probability at
    most the stated error rate, however often one looks.
    """

    mean: float | None
    low: float
    high: float


def lower_bounds(values: Sequence[float] | Values, error: float) -> Values:
    """Return the lower bound on the mean after each of `values`.

    `values` are in [0, 1], in order of arrival; the result has their length. The bounds rise only, and the
    probability that any of them is above the mean is at most `error`.
    """
    values_T = np.asarray(values, dtype=np.float64)
    bets_TH = _bets(values_T, error)
    means_G = np.linspace(0.0, 1.0, _GRID)
    caps_G = _LARGEST_BET / np.maximum(means_G, 1e-9)
    threshold = -math.log(error)
    capital_HG = np.zeros((len(_HORIZONS), _GRID))
    found: list[Values] = []
    for start in range(0, len(values_T), _BLOCK):
        part_B = values_T[start : start + _BLOCK, None, None]
        bets_BHG = np.minimum(bets_TH[start : start + _BLOCK, :, None], caps_G)
        capital_BHG = capital_HG + np.cumsum(np.log1p(bets_BHG * (part_B - means_G)), axis=0)
        capital_HG = capital_BHG[-1]
        # The player divides the first capital among the strategies.
        capital_BG = np.logaddexp.reduce(capital_BHG, axis=1) - math.log(len(_HORIZONS))
        # Capital falls as m rises, so the ruined means are the first ones of the grid.
        ruined_B = (capital_BG >= threshold).sum(axis=1)
        found.append(np.where(ruined_B > 0, means_G[np.maximum(ruined_B - 1, 0)], 0.0))
    return np.maximum.accumulate(np.concatenate(found)) if found else np.zeros(0)


def interval(values: Sequence[float], error: float, *, low: float = 0.0, high: float = 1.0) -> Interval:
    """Return bounds on the mean of `values`, which are clipped to [low, high]. `error` is that of each side."""
    scaled = scale(values, low, high)
    if not len(scaled):
        return Interval(low, high)
    width = high - low
    lower = float(lower_bounds(scaled, error)[-1])
    upper = 1.0 - float(lower_bounds(1.0 - scaled, error)[-1])
    return Interval(low + width * lower, low + width * upper)


def compare(
    new: Sequence[float], old: Sequence[float], error: float, *, low: float = 0.0, high: float = 1.0
) -> Comparison:
    """Compare the means of two samples, whose values are clipped to [low, high].

    Each sample is bounded with half of `error` on each side, so neither conclusion needs the samples to be equally
    large, paired, or collected alternately.
    """
    of_new = interval(new, error / 2, low=low, high=high)
    of_old = interval(old, error / 2, low=low, high=high)
    mean = None
    if len(new) and len(old):
        mean = float(np.mean(np.clip(new, low, high)) - np.mean(np.clip(old, low, high)))
    return Comparison(mean, of_new.low - of_old.high, of_new.high - of_old.low)


def compare_pairs(differences: Sequence[float], error: float, *, width: float) -> Comparison:
    """Compare two means by the differences (new minus old) of pairs, which are within [-width, width]."""
    found = interval(differences, error, low=-width, high=width)
    mean = float(np.mean(np.clip(differences, -width, width))) if len(differences) else None
    return Comparison(mean, found.low, found.high)


def scale(values: Sequence[float], low: float, high: float) -> Values:
    """Return the values clipped to [low, high] and mapped to [0, 1]."""
    return (np.clip(np.asarray(values, dtype=np.float64), low, high) - low) / (high - low)


def _bets(values_T: Values, error: float) -> Values:
    """Return the bets before each value, one for each horizon. They are functions of the values before it alone, or
    the capital would be no supermartingale.

    For a horizon of n values and their variance so far, this bet makes the bound after n values about as high as
    possible. It is the paper's predictable plug-in with a fixed n in place of a growing number.
    """
    times_T = np.arange(1, len(values_T) + 1, dtype=np.float64)
    means_T = (0.5 + np.cumsum(values_T)) / (times_T + 1)
    variances_T = (0.25 + np.cumsum((values_T - means_T) ** 2)) / (times_T + 1)
    before_T = np.concatenate([[0.25], variances_T[:-1]])
    return np.asarray(np.sqrt(2 * -math.log(error) / (before_T[:, None] * np.asarray(_HORIZONS))))
