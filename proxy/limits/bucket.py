"""How far a steady allowance is used: the generic cell rate algorithm (GCRA, ITU-T I.371), the leaky bucket as one
number.

Every unit that is used moves `due_at`, when all that was used will have flowed in, by the time that one unit takes to
flow in. It may be ahead of now by so much, and no more. Pure; times are in seconds since the epoch.
"""

from __future__ import annotations

import msgspec

SET_BACK_SECONDS = 60.0
"""A clock that is behind the last one by more than this was set back. By less, it is another proxy's."""

_FRESH_SECONDS = 1.0
_FRESH_SHARE = 0.1
_ROUNDING = 1e-6
"""Seconds. The resolution of a float at today's date is a quarter of it."""


class Rate(msgspec.Struct, frozen=True, kw_only=True):
    """`per_minute` units flow in, and those of `burst_seconds` may be used at once; one at least.

    A proxy may take several units at once and use each within `kept_seconds`. So that what is used in any `t` seconds
    is at most `per_minute / 60 * (t + burst_seconds)` all the same, less may be taken in advance.
    """

    per_minute: float
    burst_seconds: float

    @property
    def unit_seconds(self) -> float:
        return 60.0 / self.per_minute

    @property
    def fresh_seconds(self) -> float:
        """How long what a proxy knows of the level is good enough."""
        return min(_FRESH_SECONDS, _FRESH_SHARE * self.burst_seconds)

    @property
    def most_taken(self) -> int:
        """Units at once."""
        return max(1, int(self.fresh_seconds / self.unit_seconds))

    @property
    def kept_seconds(self) -> float:
        """0 where one unit is taken at once: it is used at that moment."""
        return self.fresh_seconds if self.most_taken > 1 else 0.0

    @property
    def ahead_seconds(self) -> float:
        """How far `due_at` may be ahead of now when units are taken."""
        return max(self.unit_seconds, self.burst_seconds - self.kept_seconds)


class Level(msgspec.Struct, frozen=True, kw_only=True):
    """How far an allowance is used. `moved_at`: the latest clock of those who used it; `per_minute`: their rate."""

    due_at: float = 0.0
    moved_at: float = 0.0
    per_minute: float = 0.0

    def seen(self, rate: Rate, now: float) -> Level:
        """The same by a clock that shows `now`, and a rate that may be another one since.

        A clock that was set back goes on from there: what is owed stays, and is not waited for by the old clock. By a
        higher rate, what was used flows in sooner; by a lower one, as soon as it would have.
        """
        level = self
        if level.moved_at > now + SET_BACK_SECONDS:
            set_back = level.moved_at - now
            level = Level(due_at=level.due_at - set_back, moved_at=now, per_minute=level.per_minute)
        if level.per_minute < rate.per_minute and level.due_at > now:
            due_at = now + (level.due_at - now) * level.per_minute / rate.per_minute
            level = Level(due_at=due_at, moved_at=level.moved_at, per_minute=rate.per_minute)
        return level

    def used(self, units: float, rate: Rate, now: float) -> Level:
        """After `units` more."""
        due_at = max(self.due_at, now) + units * rate.unit_seconds
        return Level(due_at=due_at, moved_at=max(self.moved_at, now), per_minute=rate.per_minute)

    def room(self, rate: Rate, now: float) -> int:
        """Whole units that may be taken now."""
        left = now + rate.ahead_seconds - max(self.due_at, now)
        return max(0, int((left + _ROUNDING) / rate.unit_seconds))

    def wait(self, units: float, rate: Rate, now: float) -> float:
        """Seconds until `units` may be taken, if nobody else takes any; 0: now. With 0 units: until the allowance is
        ahead by no more than it may be."""
        seconds = max(self.due_at, now) + units * rate.unit_seconds - rate.ahead_seconds - now
        return seconds if seconds > _ROUNDING else 0.0
