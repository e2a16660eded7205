"""The generic cell rate algorithm (GCRA, ITU-T I.371): a leaky bucket whose state is one point in time.

Units flow in at a steady rate. `due_at` is the time at which all used units will have flowed in. Each used unit moves
it into the future by the time that one unit takes to flow in, and it may only lie a tolerance after now. All
functions are pure; times are in seconds since the epoch.
"""

from __future__ import annotations

import msgspec

SET_BACK_SECONDS = 60.0
"""A clock that is further behind the latest one than this was set back. If it is nearer, it is another proxy's, and
the clocks differ."""

# How long a proxy may use its knowledge of the level: up to a second, but at most a tenth of the burst, so that small
# bursts are not exceeded by much.
_FRESH_SECONDS = 1.0
_FRESH_SHARE = 0.1

# Tolerance of comparisons, in seconds: four times the resolution of a float at the current date.
_ROUNDING = 1e-6


class Rate(msgspec.Struct, frozen=True, kw_only=True):
    """A rate of `per_minute` units. The units of `burst_seconds`, at least one, may be used at once.

    A proxy may take several units at once and use each within `lease_seconds`. To keep the units used in any `t`
    seconds below `per_minute / 60 * (t + burst_seconds)`, the tolerance for taking is smaller by the lease.
    """

    per_minute: float
    burst_seconds: float

    @property
    def unit_seconds(self) -> float:
        return 60.0 / self.per_minute

    @property
    def fresh_seconds(self) -> float:
        """How long a proxy may use its knowledge of the level."""
        return min(_FRESH_SECONDS, _FRESH_SHARE * self.burst_seconds)

    @property
    def most_at_once(self) -> int:
        """The largest number of units that a proxy may take at once."""
        return max(1, int(self.fresh_seconds / self.unit_seconds))

    @property
    def lease_seconds(self) -> float:
        """How long taken units may be used; 0 if only one is taken at once, since it is used at that moment."""
        return self.fresh_seconds if self.most_at_once > 1 else 0.0

    @property
    def tolerance_seconds(self) -> float:
        """How far `due_at` may lie after now when units have been taken (the algorithm's tau)."""
        return max(self.unit_seconds, self.burst_seconds - self.lease_seconds)


class Level(msgspec.Struct, frozen=True, kw_only=True):
    """The state of one limit. `moved_at` is the latest time of use, `per_minute` the rate at that time."""

    due_at: float = 0.0
    moved_at: float = 0.0
    per_minute: float = 0.0

    def adjusted(self, rate: Rate, now: float) -> Level:
        """Return the level adjusted to a clock that was set back and to a rate that was raised.

        With a clock that was set back, the remaining wait stays the same instead of growing by the difference. With a
        higher rate, used units flow in sooner. With a lower rate, they flow in as they would have.
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
        """Return the level after the use of `units` more."""
        due_at = max(self.due_at, now) + units * rate.unit_seconds
        return Level(due_at=due_at, moved_at=max(self.moved_at, now), per_minute=rate.per_minute)

    def room(self, rate: Rate, now: float) -> int:
        """Return the number of whole units that may be taken now."""
        left = now + rate.tolerance_seconds - max(self.due_at, now)
        return max(0, int((left + _ROUNDING) / rate.unit_seconds))

    def wait(self, units: float, rate: Rate, now: float) -> float:
        """Return the seconds until `units` may be taken if nobody else takes any; 0 if they may be taken now.

        For 0 units, return the seconds until `due_at` is within the tolerance again.
        """
        seconds = max(self.due_at, now) + units * rate.unit_seconds - rate.tolerance_seconds - now
        return seconds if seconds > _ROUNDING else 0.0
