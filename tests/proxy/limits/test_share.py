"""Properties of the limits with any number of proxies: no window exceeds the rate, and whoever waits is served."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.limits.bucket import Rate
from proxy.limits.share import Kind, Rates
from tests.proxy.limits.simulation import Proxies, most_in_any_window

RATES = st.builds(
    Rate,
    per_minute=st.one_of(st.integers(1, 100), st.integers(100, 100_000)),
    burst_seconds=st.floats(0.01, 60.0),
)
PAUSES = st.one_of(st.just(0.0), st.floats(0.0, 0.2), st.floats(0.0, 90.0))
CALLS = st.lists(st.tuples(PAUSES, st.integers(0, 3), st.integers(1, 40)), min_size=1, max_size=60)
"""(pause before in seconds, index of the proxy, calls at once)."""


def burst(rate: Rate) -> float:
    return max(1.0, rate.per_minute / 60.0 * rate.burst_seconds)


@given(rate=RATES, calls=CALLS)
def test_no_window_has_more_calls_than_the_rate_and_a_burst(rate: Rate, calls: list[tuple[float, int, int]]) -> None:
    proxies = Proxies(Rates(calls=rate), 4)
    begun: list[tuple[float, float]] = []
    start = proxies.now
    for pause, proxy, count in calls:
        proxies.now += pause
        for left in range(count, 0, -1):
            if proxies.call(proxy, waiting=left) is None:
                begun.append((proxies.now - start, 1.0))
    assert most_in_any_window(begun, rate.unit_seconds) <= burst(rate) + 1e-5 * rate.per_minute / 60.0 + 1e-6


@given(rate=RATES, calls=CALLS, offsets=st.lists(st.floats(-0.5, 0.5), min_size=4, max_size=4))
def test_clocks_that_differ_add_the_units_of_the_difference(
    rate: Rate, calls: list[tuple[float, int, int]], offsets: list[float]
) -> None:
    proxies = Proxies(Rates(calls=rate), 4, offsets)
    begun: list[tuple[float, float]] = []
    start = proxies.now
    for pause, proxy, count in calls:
        proxies.now += pause
        begun += [(proxies.now - start, 1.0) for _ in range(count) if proxies.call(proxy) is None]
    allowed = burst(rate) + (max(offsets) - min(offsets)) * rate.per_minute / 60.0
    assert most_in_any_window(begun, rate.unit_seconds) <= allowed + 1e-5 * rate.per_minute / 60.0 + 1e-6


@given(rate=RATES, calls=CALLS, most=st.integers(1, 5000))
def test_no_window_has_more_tokens_than_the_rate_a_burst_and_a_call(
    rate: Rate, calls: list[tuple[float, int, int]], most: int
) -> None:
    """Sequential calls at one proxy."""
    proxies = Proxies(Rates(tokens=rate), 1)
    used: list[tuple[float, float]] = []
    start = proxies.now
    for pause, tokens, count in calls:
        proxies.now += pause
        for number in range(count):
            if proxies.call(0) is None:
                amount = 1 + (tokens * 977 + number * 131) % most
                proxies.used(0, amount)
                used.append((proxies.now - start, amount))
    assert most_in_any_window(used, rate.unit_seconds) <= burst(rate) + most + 1e-5 * rate.per_minute / 60.0 + 1e-6


@given(calls=RATES, tokens=st.none() | RATES, before=CALLS)
def test_a_single_client_that_waits_as_advised_is_served(
    calls: Rate, tokens: Rate | None, before: list[tuple[float, int, int]]
) -> None:
    proxies = Proxies(Rates(calls=calls, tokens=tokens), 4)
    for pause, proxy, count in before:
        proxies.now += pause
        for _ in range(count):
            if proxies.call(proxy) is None and tokens is not None:
                proxies.used(proxy, 100)
                proxies.pay(proxy)
    for _ in range(3):
        asked = proxies.trades
        refusal = proxies.call(0)
        if refusal is not None and proxies.trades == asked:  # from memory: others have used more since
            proxies.now += max(1, math.ceil(refusal.seconds))
            refusal = proxies.call(0)
        if refusal is not None:
            proxies.now += max(1, math.ceil(refusal.seconds))
            again = proxies.call(0)
            if refusal.kind is Kind.TOKENS and again is not None:  # the tokens are there; now for a call
                assert again.kind is Kind.CALLS
                proxies.now += max(1, math.ceil(again.seconds))
                again = proxies.call(0)
            assert again is None


def test_a_steady_agent_gets_the_whole_rate() -> None:
    proxies = Proxies(Rates(calls=Rate(per_minute=600, burst_seconds=10.0)), 1)
    begun = 0
    for _ in range(6000):
        proxies.now += 0.01
        begun += proxies.call(0) is None
    assert begun >= 590


@pytest.mark.parametrize("count", [1, 4])
def test_agents_below_the_limit_are_not_refused_and_mostly_do_not_wait(count: int) -> None:
    proxies = Proxies(Rates(calls=Rate(per_minute=6000, burst_seconds=10.0)), count)
    refused = 0
    for number in range(4000):  # 80 a second, of 100
        proxies.now += 0.0125
        refused += proxies.call(number % count) is not None
    assert refused == 0
    assert proxies.trades <= 50 * count * 1.5


def test_taken_calls_that_are_not_used_are_lost_when_the_lease_ends() -> None:
    proxies = Proxies(Rates(calls=Rate(per_minute=600, burst_seconds=10.0)), 2)
    for _ in range(9):
        assert proxies.call(0, waiting=10) is None
    trades = proxies.trades
    proxies.now += 1.5
    assert proxies.call(0) is None
    assert proxies.trades == trades + 1


def test_the_store_is_not_asked_while_a_refusal_applies() -> None:
    proxies = Proxies(Rates(calls=Rate(per_minute=1, burst_seconds=1.0)), 1)
    assert proxies.call(0) is None
    refusals = [proxies.call(0) for _ in range(100)]
    assert {refusal.kind for refusal in refusals if refusal is not None} == {Kind.CALLS}
    assert None not in refusals
    assert proxies.trades == 2


def test_tokens_paid_by_one_proxy_delay_the_others() -> None:
    proxies = Proxies(Rates(tokens=Rate(per_minute=6000, burst_seconds=10.0)), 2)
    assert proxies.call(0) is None
    proxies.used(0, 7000)
    own = proxies.call(0)
    assert own is not None, "its own debt it knows at once"
    other = proxies.call(1)
    assert other is not None
    assert other.kind is Kind.TOKENS
    assert other.seconds == pytest.approx(61.0)


@given(back=st.floats(1.0, 1e6), rate=RATES)
def test_a_clock_that_was_set_back_blocks_calls_for_at_most_a_minute(back: float, rate: Rate) -> None:
    proxies = Proxies(Rates(calls=rate), 2)
    for _ in range(50):
        proxies.call(0, waiting=50)
    proxies.now -= back
    refusal = proxies.call(1)
    if refusal is not None:
        assert refusal.seconds <= 60.0 + max(rate.unit_seconds, rate.burst_seconds) + rate.unit_seconds + 1e-3
        proxies.now += refusal.seconds + 0.01
        assert proxies.call(1) is None


def test_owed_tokens_stay_owed_when_the_clock_is_set_back() -> None:
    proxies = Proxies(Rates(tokens=Rate(per_minute=60, burst_seconds=10.0)), 2)
    assert proxies.call(0) is None
    proxies.used(0, 609)
    proxies.pay(0)
    proxies.now -= 86400.0
    refusal = proxies.call(1)
    assert refusal is not None
    assert refusal.seconds == pytest.approx(599.0)


def test_standings_report_the_remaining_limit() -> None:
    proxies = Proxies(
        Rates(calls=Rate(per_minute=60, burst_seconds=10.0), tokens=Rate(per_minute=6000, burst_seconds=10.0)), 1
    )
    assert proxies.call(0) is None
    proxies.used(0, 100)
    calls, tokens = proxies.standings(0)
    assert (calls.kind, calls.limit, calls.left) == (Kind.CALLS, 60, 9)
    assert (tokens.kind, tokens.limit, tokens.left) == (Kind.TOKENS, 6000, 800)
    assert [calls.reset_seconds, tokens.reset_seconds] == pytest.approx([1.0, 1.0])
