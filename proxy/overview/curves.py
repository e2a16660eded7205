"""Builds the reward curve from buckets of sessions, without I/O."""

from __future__ import annotations

from collections.abc import Sequence

from proxy.overview.views import RewardPoint

# Points of the reward curve: more than a chart has pixels to tell apart.
_MAX_BUCKETS = 400


def bucket_stride(sessions: int) -> int:
    """Return the number of sessions per point of the reward curve."""
    # A power of two, so that points do not move as a run grows, except when two become one.
    stride = 1
    while sessions > stride * _MAX_BUCKETS:
        stride *= 2
    return stride


def reward_points(buckets: Sequence[tuple[int, float, float]], window: int) -> tuple[RewardPoint, ...]:
    """Return the points of the reward curve. `buckets` are (sessions, at, sum of rewards), oldest first.

    The moving mean is over the last buckets that together have at least `window` sessions, or over all while there
    are fewer.
    """
    points: list[RewardPoint] = []
    first, inside, total, so_far = 0, 0, 0.0, 0
    for count, at, reward in buckets:
        inside, total, so_far = inside + count, total + reward, so_far + count
        while inside - buckets[first][0] >= window:
            inside, total, first = inside - buckets[first][0], total - buckets[first][2], first + 1
        points.append(RewardPoint(sessions=so_far, at=at, mean=reward / count, moving_mean=total / inside))
    return tuple(points)
