"""One proxy's share of the limits of a run, project or key. Everything here is pure; `subject_share.py` reads and
writes the store."""

from __future__ import annotations

import math
from enum import StrEnum

import msgspec

from proxy.limits.bucket import Level, Rate
from proxy.limits.budget import Budget, Period, Spent

# Seconds. The minimum of a refusal, and of the time over which the rate of calls is estimated.
_SOON = 1e-3

# How long a proxy may use its knowledge of a budget.
_BUDGET_FRESH_SECONDS = 1.0


class Kind(StrEnum):
    CALLS = "calls"
    TOKENS = "tokens"


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """The rates of calls and tokens, None for no limit, and the budgets."""

    calls: Rate | None = None
    tokens: Rate | None = None
    budgets: tuple[Budget, ...] = ()


class Levels(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of one subject's limits that are used, by all proxies together."""

    calls: Level = Level()
    tokens: Level = Level()
    spent: dict[Period, Spent] = {}

    def exhausted_since(self, before: Levels) -> tuple[Period, ...]:
        """Return the periods whose budget was not known as exhausted before."""
        return tuple(
            period
            for period, spent in self.spent.items()
            if spent.exhausted_at is not None and spent.exhausted_at != before.spent.get(period, Spent()).exhausted_at
        )


class Trade(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one exchange with the store: `calls` that the proxy may begin, `tokens` that it has paid."""

    levels: Levels
    calls: int
    tokens: int


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """The limit for which a call must wait, and for how many seconds."""

    kind: Kind | Period
    seconds: float


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a limit for clients: `left` units could be used now, the whole burst in `reset_seconds`."""

    kind: Kind
    limit: int
    left: int
    reset_seconds: float


def trade(levels: Levels, rates: Rates, *, calls: int, tokens: int, now: float) -> Trade:
    """Pay `tokens` and take up to `calls`; take none while the tokens' level exceeds its tolerance or a budget is
    exhausted."""
    call_level, token_level, taken = levels.calls, levels.tokens, 0
    spent = {
        budget.period: levels.spent.get(budget.period, Spent()).paid(budget, tokens, now) for budget in rates.budgets
    }
    must_wait = any(one.exhausted_at is not None for one in spent.values())
    if rates.tokens is not None:
        token_level = token_level.adjusted(rates.tokens, now)
        token_level = token_level.used(tokens, rates.tokens, now) if tokens else token_level
        must_wait = must_wait or token_level.wait(0, rates.tokens, now) > 0
    if rates.calls is not None:
        call_level = call_level.adjusted(rates.calls, now)
        taken = 0 if must_wait else min(calls, call_level.room(rates.calls, now))
        call_level = call_level.used(taken, rates.calls, now) if taken else call_level
    return Trade(levels=Levels(calls=call_level, tokens=token_level, spent=spent), calls=taken, tokens=tokens)


class Share:
    """The calls that a proxy has taken and may still begin, the tokens that it owes, and its knowledge of the levels.

    Calls that are not begun before the lease ends are lost, so a proxy takes about as many as it used recently.
    """

    def __init__(self, rates: Rates) -> None:
        self.rates = rates
        self.owed = 0  # tokens that were used here and are not in the store yet
        self._levels = Levels()
        self._taken_at = self._lease_ends_at = -math.inf
        self._calls = self._used = 0
        self._refusal: tuple[Kind | Period, float, float] | None = None

    def refusal(self, now: float) -> Refusal | None:
        """Return the last refusal while it applies; asking the store is useless, since only time makes room."""
        if self._refusal is None or not self._refusal[1] <= now < self._refusal[2]:
            return None
        kind, _since, until = self._refusal
        return Refusal(kind=kind, seconds=until - now)

    def use_call(self, now: float) -> bool:
        """Begin a call with the calls taken before. Return False if none is left or the lease has ended."""
        # `_taken_at <= now` fails if the clock was set back, when the lease could seem to last for hours.
        if not self._taken_at <= now <= self._lease_ends_at or self._tokens_wait(now)[1]:
            return False
        if self.rates.calls is not None:
            if self._calls == 0:
                return False
            self._calls -= 1
        self._used += 1
        return True

    def return_call(self, now: float) -> None:
        """Take back a call that did not begin, because another limit refused it."""
        if self._taken_at <= now <= self._lease_ends_at:
            self._calls += self.rates.calls is not None
            self._used -= 1

    def wanted(self, waiting: int, now: float) -> int:
        """Return how many calls to take when `waiting` calls could begin at once.

        It is the number that will be used during a lease at the recent rate, at most twice as many as in the last
        one.
        """
        rate = self.rates.calls
        if rate is None:
            return 0
        since = max(now - self._taken_at, _SOON)
        expected = min(2 * self._used, math.ceil(self._used * rate.lease_seconds / since))
        return max(1, min(max(waiting, expected), rate.most_at_once))

    def receive(self, traded: Trade, now: float) -> None:
        """Record a trade at `now` that was made to begin a call."""
        self.paid(traded)
        self._taken_at, self._lease_ends_at = now, now + self._lease_seconds
        self._calls, self._used = traded.calls, 0
        self._refusal = None
        kind, seconds = self._tokens_wait(now)
        if seconds:
            self._refusal = (kind, now, now + seconds)
        elif self.rates.calls is not None and not traded.calls:
            self._refusal = (Kind.CALLS, now, now + max(_SOON, self._levels.calls.wait(1, self.rates.calls, now)))

    def paid(self, traded: Trade) -> None:
        """Record a trade that only paid tokens."""
        self.owed -= traded.tokens
        self._levels = traded.levels

    def standings(self, now: float) -> tuple[Standing, ...]:
        """Return the state of each limit, as far as this proxy knows it."""
        found = []
        if self.rates.calls is not None:
            level = self._levels.calls
            left = level.room(self.rates.calls, now) + (self._calls if now <= self._lease_ends_at else 0)
            found.append(_standing(Kind.CALLS, self.rates.calls, level, left, now))
        if self.rates.tokens is not None:
            level = self._levels.tokens.used(self.owed, self.rates.tokens, now)
            found.append(_standing(Kind.TOKENS, self.rates.tokens, level, level.room(self.rates.tokens, now), now))
        return tuple(found)

    @property
    def _lease_seconds(self) -> float:
        if self.rates.calls is not None:
            return self.rates.calls.lease_seconds
        return self.rates.tokens.fresh_seconds if self.rates.tokens is not None else _BUDGET_FRESH_SECONDS

    def _tokens_wait(self, now: float) -> tuple[Kind | Period, float]:
        """Return the limit of tokens for which calls must wait longest, and the seconds; 0 for none."""
        waits: list[tuple[Kind | Period, float]] = []
        if (rate := self.rates.tokens) is not None:
            waits.append((Kind.TOKENS, self._levels.tokens.used(self.owed, rate, now).wait(0, rate, now)))
        for budget in self.rates.budgets:
            spent = self._levels.spent.get(budget.period, Spent())
            waits.append((budget.period, spent.wait(budget, self.owed, now)))
        return max(waits, key=lambda wait: wait[1], default=(Kind.TOKENS, 0.0))


def _standing(kind: Kind, rate: Rate, level: Level, left: int, now: float) -> Standing:
    return Standing(kind=kind, limit=int(rate.per_minute), left=left, reset_seconds=max(0.0, level.due_at - now))
