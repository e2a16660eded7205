"""Budgets of tokens for each day or calendar month, UTC. All functions are pure; times are in seconds since the
epoch."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from enum import StrEnum

import msgspec

from proxy.limits.bucket import SET_BACK_SECONDS


class Period(StrEnum):
    DAY = "day"
    MONTH = "month"


class Budget(msgspec.Struct, frozen=True, kw_only=True):
    """The number of tokens that may be used in each period."""

    period: Period
    tokens: int


def window(period: Period, at: float) -> tuple[float, float]:
    """Return the begin and the end of the day or month that `at` is in."""
    day = datetime.fromtimestamp(at, UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    if period is Period.DAY:
        return day.timestamp(), (day + timedelta(days=1)).timestamp()
    first = day.replace(day=1)
    # No month has 32 days, so this is a day of the next one.
    return first.timestamp(), (first + timedelta(days=32)).replace(day=1).timestamp()


class Spent(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens used in the period that begins at `starts_at`, and when they were found to exhaust the budget."""

    starts_at: float = 0.0
    tokens: int = 0
    exhausted_at: float | None = None

    def at(self, period: Period, now: float) -> Spent:
        """Return what is used of the period that `now` is in."""
        starts_at, _end = window(period, now)
        if self.starts_at < starts_at:
            return Spent(starts_at=starts_at)
        if self.starts_at > now + SET_BACK_SECONDS:
            # The clock was set back: a wrong clock must not renew a budget, nor close it until that date returns.
            return msgspec.structs.replace(self, starts_at=starts_at)
        # A proxy whose clock is slightly ahead began the period: there is one count for it.
        return self

    def paid(self, budget: Budget, tokens: int, now: float) -> Spent:
        """Return what is used after the use of `tokens` more, with the time at which the budget was exhausted."""
        spent = self.at(budget.period, now)
        used = spent.tokens + tokens
        exhausted_at = None if used < budget.tokens else now if spent.exhausted_at is None else spent.exhausted_at
        return Spent(starts_at=spent.starts_at, tokens=used, exhausted_at=exhausted_at)

    def wait(self, budget: Budget, tokens: int, now: float) -> float:
        """Return the seconds until the next period if the budget is exhausted after `tokens` more; otherwise 0."""
        spent = self.at(budget.period, now)
        if spent.tokens + tokens < budget.tokens:
            return 0.0
        return window(budget.period, max(now, spent.starts_at))[1] - now
