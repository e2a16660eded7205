"""The course of a comparison, for pictures. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from proxy.gates.sequential import lower_bounds, scale
from proxy.settings import ReleaseSettings

# Points of a curve: more than a picture shows, few enough for a row of the store.
_MOST_POINTS = 120


def difference_curve(
    release: ReleaseSettings, new: Sequence[float], old: Sequence[float], error: float
) -> list[tuple[int, float, float, float]]:
    """Return (new sessions, mean difference, low, high) after some of the new sessions, the last one included. The
    bounds are those of `compare` with the same `error`.

    The old sample is taken as long as it was relative to the new one: samples grow together, and the store does not
    record which session of the other side ended before.
    """
    if not len(new) or not len(old):
        return []
    low, width = release.reward_low, release.reward_high - release.reward_low
    error /= 2
    new_T, old_T = scale(new, low, release.reward_high), scale(old, low, release.reward_high)
    new_low_T, new_high_T = lower_bounds(new_T, error), 1 - lower_bounds(1 - new_T, error)
    old_low_T, old_high_T = lower_bounds(old_T, error), 1 - lower_bounds(1 - old_T, error)
    new_mean_T, old_mean_T = _running_mean(new_T), _running_mean(old_T)
    points = []
    for count in sorted(set(np.linspace(1, len(new_T), min(len(new_T), _MOST_POINTS)).astype(int).tolist())):
        other = max(1, round(count * len(old_T) / len(new_T))) - 1
        at = count - 1
        points.append(
            (
                count,
                round(float(width * (new_mean_T[at] - old_mean_T[other])), 5),
                round(float(width * (new_low_T[at] - old_high_T[other])), 5),
                round(float(width * (new_high_T[at] - old_low_T[other])), 5),
            )
        )
    return points


def _running_mean(
    values_T: np.ndarray[tuple[int, ...], np.dtype[np.float64]],
) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    return np.asarray(np.cumsum(values_T) / np.arange(1, len(values_T) + 1))
