"""How far a judge agrees with people. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import msgspec

# Buckets of the calibration.
_BUCKETS = 5
# Fewer pairs say nothing about a correlation.
FEWEST_PAIRS = 5


class Bucket(msgspec.Struct, frozen=True, kw_only=True):
    """Pairs whose judge's score is from `low` to `high`: their number, and the means of both."""

    low: float
    high: float
    count: int
    judge_mean: float
    people_mean: float


class Agreement(msgspec.Struct, frozen=True, kw_only=True):
    """A judge's scores beside people's rewards of the same subjects.

    `correlation` is Pearson's. `kappa` is Cohen's, of "above the middle of the judge's range" against the same for
    people. Both are None for fewer than FEWEST_PAIRS pairs, or if one side is constant. `mean_difference` is the mean
    of judge minus people.
    """

    pairs: int
    correlation: float | None
    kappa: float | None
    mean_difference: float | None
    calibration: list[Bucket]


def agreement_of(pairs: Sequence[tuple[float, float]], *, low: float, high: float) -> Agreement:
    """Return the agreement of (judge, people) pairs. `low` and `high` are the judge's range."""
    if len(pairs) < FEWEST_PAIRS:
        return Agreement(pairs=len(pairs), correlation=None, kappa=None, mean_difference=None, calibration=[])
    judge, people = [one for one, _ in pairs], [other for _, other in pairs]
    return Agreement(
        pairs=len(pairs),
        correlation=_correlation(judge, people),
        kappa=_kappa(pairs, (low + high) / 2),
        mean_difference=statistics.fmean(one - other for one, other in pairs),
        calibration=_calibration(pairs, low, high),
    )


def _correlation(ones: Sequence[float], others: Sequence[float]) -> float | None:
    try:
        found = statistics.correlation(ones, others)
    except statistics.StatisticsError:  # one side is constant
        return None
    return found if math.isfinite(found) else None


def _kappa(pairs: Sequence[tuple[float, float]], middle: float) -> float | None:
    """Return Cohen's kappa of two raters who say yes above the middle."""
    count = len(pairs)
    observed = sum((one > middle) == (other > middle) for one, other in pairs) / count
    yes_one = sum(one > middle for one, _ in pairs) / count
    yes_other = sum(other > middle for _, other in pairs) / count
    if {yes_one, yes_other} & {0.0, 1.0}:
        return None  # one side always says the same, so there is nothing to agree about
    expected = yes_one * yes_other + (1 - yes_one) * (1 - yes_other)
    return (observed - expected) / (1 - expected)


def _calibration(pairs: Sequence[tuple[float, float]], low: float, high: float) -> list[Bucket]:
    width = (high - low) / _BUCKETS
    buckets: dict[int, list[tuple[float, float]]] = {}
    for pair in pairs:
        place = min(_BUCKETS - 1, max(0, int((pair[0] - low) / width)))
        buckets.setdefault(place, []).append(pair)
    return [
        Bucket(
            low=low + place * width,
            high=low + (place + 1) * width,
            count=len(found),
            judge_mean=statistics.fmean(one for one, _ in found),
            people_mean=statistics.fmean(other for _, other in found),
        )
        for place, found in sorted(buckets.items())
    ]
