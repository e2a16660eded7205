"""Whether the scores of a judge have drifted. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

# Scores in each of the two windows that are compared for drift.
WINDOW = 50
# The bounds of drift: the mean moved by this many standard deviations, or the spread changed by this factor.
_MEAN_BOUND = 1.0
_SPREAD_BOUND = 3.0


def drift_of(scores: Sequence[float]) -> str | None:
    """Return how the newest WINDOW scores differ from those before; None if they do not, or are too few. `scores` are
    in order of arrival, of one form of the judge."""
    if len(scores) < 2 * WINDOW:
        return None
    before, now = scores[-2 * WINDOW : -WINDOW], scores[-WINDOW:]
    mean_then, mean_now = statistics.fmean(before), statistics.fmean(now)
    spread_then, spread_now = statistics.pstdev(before), statistics.pstdev(now)
    # A judge that always says the same has no spread to compare with.
    if abs(mean_now - mean_then) > _MEAN_BOUND * max(spread_then, spread_now) > 0:
        return f"its mean went from {mean_then:.3g} to {mean_now:.3g} within its last {2 * WINDOW} scores"
    if spread_then > _SPREAD_BOUND * spread_now:
        return (
            f"its scores' spread went from {spread_then:.3g} to {spread_now:.3g} within its last {2 * WINDOW} scores"
        )
    return None
