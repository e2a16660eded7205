from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.algorithm.rounding import deviations, equal_but_for_rounding, mean_of, mean_square

numbers = st.floats(-1e12, 1e12)


@given(numbers, st.integers(1, 40))
def test_the_mean_of_equal_values_is_their_value(value: float, count: int) -> None:
    assert mean_of([value] * count) == value
    assert deviations([value] * count) == [0.0] * count


@given(st.lists(numbers, min_size=1, max_size=20))
def test_means_against_exact_fractions(values: list[float]) -> None:
    exact = sum(map(Fraction, values)) / len(values)
    biggest = max(map(abs, values))
    assert mean_of(values) == pytest.approx(float(exact), abs=1e-12 * biggest)
    square = sum((Fraction(value) - exact) ** 2 for value in values) / len(values)
    assert mean_square(values, float(exact)) == pytest.approx(float(square), rel=1e-9, abs=1e-18 * biggest**2)
    found = deviations(values)
    for value, each in zip(values, found, strict=True):
        assert each == pytest.approx(float(Fraction(value) - exact), abs=1e-12 * biggest)


def test_sums_in_another_order_are_equal_and_other_rewards_are_not() -> None:
    assert equal_but_for_rounding((0.1 + 0.2, 0.3))
    assert equal_but_for_rounding((math.fsum([0.1] * 10), sum([0.1] * 10)))
    assert not equal_but_for_rounding((0.3, 0.3 + 1e-12))
    assert not equal_but_for_rounding((0.0, 1e-300))
