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
    for count in _counts(len(new_T)):
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


def share_curve(values: Sequence[float], error: float, *, centre: float) -> list[tuple[int, float, float, float]]:
    """Return (number, mean, low, high) after some of the values, which are in [0, 1], the last one included.

    Means and bounds are relative to `centre`. The bounds are those of `interval` with the same `error`.
    """
    values_T = np.asarray(values, dtype=np.float64)
    low_T, high_T = lower_bounds(values_T, error), 1 - lower_bounds(1 - values_T, error)
    mean_T = _running_mean(values_T)
    mean, low, high = (np.round(each_T - centre, 5).tolist() for each_T in (mean_T, low_T, high_T))
    return [(count, mean[count - 1], low[count - 1], high[count - 1]) for count in _counts(len(values_T))]


def _counts(length: int) -> list[int]:
    """Return the places of a curve's points, from 1 to `length`."""
    return sorted(set(np.linspace(1, length, min(length, _MOST_POINTS)).astype(int).tolist()))


def _running_mean(
    values_T: np.ndarray[tuple[int, ...], np.dtype[np.float64]],
) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    return np.asarray(np.cumsum(values_T) / np.arange(1, len(values_T) + 1))
