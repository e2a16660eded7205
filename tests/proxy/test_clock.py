from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.clock import SteadyClock, system_clock


class Hands:
    """A wall clock and a monotonic clock that a test sets."""

    def __init__(self) -> None:
        self.wall, self.steady = 1_000_000.0, 50.0
        self.clock = SteadyClock(lambda: self.wall, lambda: self.steady)

    def pass_(self, seconds: float) -> None:
        self.wall += seconds
        self.steady += seconds


def test_it_is_the_systems_time() -> None:
    assert system_clock() == pytest.approx(time.time(), abs=5)


def test_a_clock_that_is_set_back_continues_from_its_last_time() -> None:
    hands = Hands()
    hands.pass_(10)
    assert hands.clock() == 1_000_010.0
    hands.wall -= 3600
    assert hands.clock() == 1_000_010.0
    hands.pass_(120)
    assert hands.clock() == 1_000_130.0, "a lease of two minutes is over after two minutes"
    hands.wall += 3600 + 5
    assert hands.clock() == 1_000_135.0


def test_a_clock_that_is_set_forward_is_followed() -> None:
    hands = Hands()
    hands.wall += 3600
    assert hands.clock() == 1_003_600.0


@given(st.lists(st.tuples(st.floats(-1e5, 1e5), st.floats(0, 1e4)), max_size=30))
def test_it_never_goes_back_and_never_lags(changes: list[tuple[float, float]]) -> None:
    hands = Hands()
    told = hands.clock()
    for set_by, passed in changes:
        hands.wall += set_by
        hands.pass_(passed)
        now = hands.clock()
        assert now >= max(told, hands.wall)
        told = now
