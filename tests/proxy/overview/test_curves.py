from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from proxy.overview.curves import bucket_stride, reward_points

REWARDS = st.lists(st.floats(-10, 10), min_size=1, max_size=300)


@given(REWARDS, st.integers(1, 40))
def test_with_one_session_a_point_the_moving_mean_is_that_of_the_last_window(
    rewards: list[float], window: int
) -> None:
    points = reward_points([(1, float(index), reward) for index, reward in enumerate(rewards)], window)
    for index, point in enumerate(points):
        last = rewards[max(0, index + 1 - window) : index + 1]
        assert point.sessions == index + 1
        assert math.isclose(point.moving_mean, sum(last) / len(last), abs_tol=1e-9)


@given(st.lists(st.tuples(st.integers(1, 50), st.floats(0, 1)), min_size=1, max_size=60), st.integers(1, 200))
def test_buckets_count_every_session_and_means_stay_within_the_rewards(
    buckets: list[tuple[int, float]], window: int
) -> None:
    points = reward_points([(count, 0.0, count * mean) for count, mean in buckets], window)
    assert points[-1].sessions == sum(count for count, _ in buckets)
    low, high = min(mean for _, mean in buckets), max(mean for _, mean in buckets)
    assert all(low - 1e-9 <= point.moving_mean <= high + 1e-9 for point in points)


@given(st.integers(0, 10_000_000))
def test_a_curve_stays_small_and_its_points_stay_in_place(sessions: int) -> None:
    stride = bucket_stride(sessions)
    assert sessions <= stride * 400
    assert stride.bit_count() == 1
