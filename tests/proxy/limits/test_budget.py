"""Budgets for days and months: what is counted where, whatever the clocks of the proxies say."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.limits.budget import Budget, Period, Spent, window
from proxy.limits.share import Rates
from tests.proxy.limits.simulation import Proxies

PERIODS = st.sampled_from(Period)
TIMES = st.floats(1_600_000_000.0, 1_900_000_000.0)


def at(text: str) -> float:
    return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()


@pytest.mark.parametrize(
    ("period", "now", "begin", "end"),
    [
        (Period.DAY, "2026-11-25T18:00", "2026-11-25", "2026-11-26"),
        (Period.DAY, "2026-12-31T23:59:59", "2026-12-31", "2027-01-01"),
        (Period.MONTH, "2028-02-29T12:00", "2028-02-01", "2028-03-01"),
        (Period.MONTH, "2026-12-01T00:00", "2026-12-01", "2027-01-01"),
    ],
)
def test_periods_are_days_and_calendar_months(period: Period, now: str, begin: str, end: str) -> None:
    assert window(period, at(now)) == (at(begin), at(end))


@given(PERIODS, TIMES)
def test_the_end_of_a_period_is_the_begin_of_the_next(period: Period, now: float) -> None:
    begin, end = window(period, now)
    assert begin <= now < end
    assert window(period, end)[0] == end


@given(PERIODS, TIMES, st.lists(st.tuples(st.floats(0.0, 40_000.0), st.integers(0, 400)), max_size=30))
def test_calls_wait_exactly_until_the_next_period(period: Period, now: float, uses: list[tuple[float, int]]) -> None:
    budget, spent, counted = Budget(period=period, tokens=1000), Spent(), 0
    for pause, tokens in uses:
        begin = window(period, now)[0]
        now += pause
        counted = (counted if window(period, now)[0] == begin else 0) + tokens
        spent = spent.paid(budget, tokens, now)
        assert spent.tokens == counted
        assert (spent.exhausted_at is not None) == (counted >= 1000)
        wait = spent.wait(budget, 0, now)
        assert wait == (window(period, now)[1] - now if counted >= 1000 else 0.0)


def test_neither_a_clock_that_is_ahead_nor_one_that_was_set_back_renews_a_budget() -> None:
    budget = Budget(period=Period.DAY, tokens=100)
    tomorrow = Spent().paid(budget, 60, at("2026-11-26T00:00:10"))
    behind = tomorrow.paid(budget, 60, at("2026-11-25T23:59:50"))
    assert (behind.starts_at, behind.tokens) == (at("2026-11-26"), 120)
    assert behind.wait(budget, 0, at("2026-11-25T23:59:50")) == 86410.0
    set_back = behind.at(Period.DAY, at("2026-11-20T12:00"))
    assert (set_back.starts_at, set_back.tokens) == (at("2026-11-20"), 120)


@given(
    st.lists(st.tuples(st.floats(0.0, 2.0), st.integers(0, 2), st.integers(1, 50)), min_size=1, max_size=60),
    st.integers(50, 500),
)
def test_no_call_begins_once_the_budget_is_known_to_be_used(calls: list[tuple[float, int, int]], tokens: int) -> None:
    """Every proxy pays a call's tokens at once here, so at most one call of each is late."""
    proxies = Proxies(Rates(budgets=(Budget(period=Period.DAY, tokens=tokens),)), 3)
    proxies.now = at("2026-11-25T12:00")
    used = 0
    for pause, proxy, count in calls:
        proxies.now += pause
        refusal = proxies.call(proxy)
        if refusal is None:
            used += count
            proxies.used(proxy, count)
            proxies.pay(proxy)
        else:
            assert used >= tokens
            assert refusal.kind is Period.DAY
            assert refusal.seconds == pytest.approx(at("2026-11-26") - proxies.now)
    assert used < tokens + 3 * 50
