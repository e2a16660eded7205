"""The sequential test: bounds that hold however often one looks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.gates.sequential import compare, compare_pairs, interval, lower_bounds, scale

VALUES = st.lists(st.floats(0, 1), min_size=1, max_size=60)
ERRORS = st.floats(1e-4, 0.4)


@given(VALUES, ERRORS)
@settings(max_examples=60, deadline=None)
def test_bounds_rise_only_and_never_exceed_the_possible(values: list[float], error: float) -> None:
    found = lower_bounds(values, error)
    assert len(found) == len(values)
    assert np.all(np.diff(found) >= 0)
    assert np.all((found >= 0) & (found <= 1))


@given(VALUES, ERRORS)
@settings(max_examples=60, deadline=None)
def test_a_bound_depends_on_the_values_before_it_alone(values: list[float], error: float) -> None:
    whole = lower_bounds(values, error)
    half = len(values) // 2
    assert np.array_equal(whole[:half], lower_bounds(values[:half], error))


@given(VALUES, VALUES, ERRORS)
@settings(max_examples=40, deadline=None)
def test_comparing_the_other_way_round_mirrors_the_bounds(new: list[float], old: list[float], error: float) -> None:
    one, other = compare(new, old, error), compare(old, new, error)
    assert one.low == pytest.approx(-other.high)
    assert one.high == pytest.approx(-other.low)


@given(VALUES, st.floats(-5, 5), st.floats(0.1, 10))
@settings(max_examples=40, deadline=None)
def test_bounds_follow_the_scale_of_the_values(values: list[float], low: float, width: float) -> None:
    scaled = interval([low + width * value for value in values], 0.05, low=low, high=low + width)
    plain = interval(values, 0.05)
    # Rounding of the scaled values can move a bound by one step of the grid.
    assert scaled.low == pytest.approx(low + width * plain.low, abs=0.0051 * width)
    assert scaled.high == pytest.approx(low + width * plain.high, abs=0.0051 * width)


def test_without_values_nothing_is_known() -> None:
    assert interval([], 0.05, low=-1, high=2) == (-1, 2)
    assert compare([], [1.0], 0.05).mean is None
    assert scale([-3, 0.5, 9], 0, 1).tolist() == [0, 0.5, 1]


def test_under_continuous_looking_equal_means_are_seldom_called_different() -> None:
    """The type-I error: of 300 pairs of equal streams, looked at after each of 200 values, at most 5 % may ever show
    a difference (plus three standard deviations of the count)."""
    rng, runs, wrong = np.random.default_rng(0), 300, 0
    for index in range(runs):
        mean = (0.1, 0.5, 0.9)[index % 3]
        new, old = (rng.random((2, 200)) < mean).astype(float)
        upper = 1 - lower_bounds(1 - new, 0.025)
        wrong += bool((upper < lower_bounds(old, 0.025)).any())
    assert wrong <= runs * 0.05 + 3 * (runs * 0.05 * 0.95) ** 0.5


def test_a_lower_mean_is_found_and_its_size_is_right() -> None:
    rng = np.random.default_rng(1)
    found = compare((rng.random(400) < 0.4).tolist(), (rng.random(400) < 0.8).tolist(), 0.05)
    assert found.high < 0
    assert found.low < -0.4 < found.high
    pairs = compare_pairs((rng.choice([-1.0, 0.0, 1.0], 300, p=[0.4, 0.5, 0.1])).tolist(), 0.05, width=1)
    assert pairs.low < -0.3 < pairs.high < 0
