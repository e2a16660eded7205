"""What one proxy holds of a run's allowance. Pure: the trade with the store is somebody else's."""

from __future__ import annotations

import math
from enum import StrEnum

import msgspec

from proxy.limits.bucket import Level, Rate

_SOON = 1e-3
"""Seconds. No refusal is shorter, and no time in which calls were counted."""


class Kind(StrEnum):
    CALLS = "calls"
    TOKENS = "tokens"


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """Of calls and of tokens; None: any number."""

    calls: Rate | None = None
    tokens: Rate | None = None


class Levels(msgspec.Struct, frozen=True, kw_only=True):
    """How far the allowances of a run are used, by all proxies."""

    calls: Level = Level()
    tokens: Level = Level()


class Trade(msgspec.Struct, frozen=True, kw_only=True):
    """What a proxy gets and pays at once: `calls` that it may begin, `tokens` that were used."""

    levels: Levels
    calls: int
    tokens: int


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """That a call must wait, for which allowance, and for how many seconds."""

    kind: Kind
    seconds: float


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """What clients are told of a limit: `left` are the units that could be used now, `reset_seconds` is when all of
    the burst could be."""

    kind: Kind
    limit: int
    left: int
    reset_seconds: float


def trade(levels: Levels, rates: Rates, *, calls: int, tokens: int, now: float) -> Trade:
    """Pays `tokens` and takes up to `calls`; none while tokens are owed for longer than they may be."""
    of_calls, of_tokens, taken, are_owed = levels.calls, levels.tokens, 0, False
    if rates.tokens is not None:
        of_tokens = of_tokens.seen(rates.tokens, now)
        of_tokens = of_tokens.used(tokens, rates.tokens, now) if tokens else of_tokens
        are_owed = of_tokens.wait(0, rates.tokens, now) > 0
    if rates.calls is not None:
        of_calls = of_calls.seen(rates.calls, now)
        taken = 0 if are_owed else min(calls, of_calls.room(rates.calls, now))
        of_calls = of_calls.used(taken, rates.calls, now) if taken else of_calls
    return Trade(levels=Levels(calls=of_calls, tokens=of_tokens), calls=taken, tokens=tokens)


class Share:
    """Calls that a proxy may begin until `kept_until`, tokens that it owes, and what it knows of the levels.

    What it does not use in time is lost: it takes as many calls as it used lately.
    """

    def __init__(self, rates: Rates) -> None:
        self.rates = rates
        self.owed = 0
        self._levels = Levels()
        self._taken_at = self._kept_until = -math.inf
        self._calls = self._used = 0
        self._refusal: tuple[Kind, float, float] | None = None

    def refusal(self, now: float) -> Refusal | None:
        """What is known without asking the store: nobody else can have made room since."""
        if self._refusal is None or not self._refusal[1] <= now < self._refusal[2]:
            return None
        kind, _since, until = self._refusal
        return Refusal(kind=kind, seconds=until - now)

    def use_call(self, now: float) -> bool:
        """Whether a call may begin by what is held."""
        if not self._taken_at <= now <= self._kept_until or self._tokens_wait(now):
            return False
        if self.rates.calls is not None:
            if self._calls == 0:
                return False
            self._calls -= 1
        self._used += 1
        return True

    def wanted(self, waiting: int, now: float) -> int:
        """How many calls to take, where `waiting` could begin at once: as many as will be used while they are kept,
        by how it was lately, and at most twice as many as were."""
        rate = self.rates.calls
        if rate is None:
            return 0
        since = max(now - self._taken_at, _SOON)
        expected = min(2 * self._used, math.ceil(self._used * rate.kept_seconds / since))
        return max(1, min(max(waiting, expected), rate.most_taken))

    def receive(self, traded: Trade, now: float) -> None:
        """What was traded at `now` so that a call could begin."""
        self.paid(traded)
        self._taken_at, self._kept_until = now, now + self._kept_seconds
        self._calls, self._used = traded.calls, 0
        self._refusal = None
        seconds = self._tokens_wait(now)
        if seconds:
            self._refusal = (Kind.TOKENS, now, now + seconds)
        elif self.rates.calls is not None and not traded.calls:
            self._refusal = (Kind.CALLS, now, now + max(_SOON, self._levels.calls.wait(1, self.rates.calls, now)))

    def paid(self, traded: Trade) -> None:
        """Tokens were, and nothing was asked for."""
        self.owed -= traded.tokens
        self._levels = traded.levels

    def standings(self, now: float) -> tuple[Standing, ...]:
        """As this proxy knows them."""
        found = []
        if self.rates.calls is not None:
            level = self._levels.calls
            left = level.room(self.rates.calls, now) + (self._calls if now <= self._kept_until else 0)
            found.append(_standing(Kind.CALLS, self.rates.calls, level, left, now))
        if self.rates.tokens is not None:
            level = self._levels.tokens.used(self.owed, self.rates.tokens, now)
            found.append(_standing(Kind.TOKENS, self.rates.tokens, level, level.room(self.rates.tokens, now), now))
        return tuple(found)

    @property
    def _kept_seconds(self) -> float:
        if self.rates.calls is not None:
            return self.rates.calls.kept_seconds
        return self.rates.tokens.fresh_seconds if self.rates.tokens is not None else 0.0

    def _tokens_wait(self, now: float) -> float:
        rate = self.rates.tokens
        return 0.0 if rate is None else self._levels.tokens.used(self.owed, rate, now).wait(0, rate, now)


def _standing(kind: Kind, rate: Rate, level: Level, left: int, now: float) -> Standing:
    return Standing(kind=kind, limit=int(rate.per_minute), left=left, reset_seconds=max(0.0, level.due_at - now))
