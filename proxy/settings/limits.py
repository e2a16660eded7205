"""Bounds on what model calls may use: of one run, of the runs of a project together, or of one key."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import ConfigDict, Field, NonNegativeInt, PositiveFloat, PositiveInt

from proxy.settings.section import Section

Tokens = Annotated[int, Field(ge=1, le=10**15)]


class UsageLimits(Section):
    """Bounds on model calls, over all proxies on one store together. None: no bound."""

    calls_per_minute: PositiveInt | None = None
    """Model calls that start."""
    tokens_per_minute: PositiveInt | None = None
    """Tokens of prompts and answers. A call's tokens are counted at its end, so calls after one that exceeded the
    limit wait until the excess has passed."""
    burst_seconds: PositiveFloat = Field(default=10.0, le=60.0)
    """A burst may use the limit of this many seconds at once, and at least one call."""
    tokens_per_day: Tokens | None = None
    """A budget of tokens of prompts and answers for each day (UTC). Once it is used, no call begins until the
    next day."""
    tokens_per_month: Tokens | None = None
    """The same for each calendar month (UTC)."""

    @property
    def bound_calls(self) -> bool:
        """Whether each call must be counted against a limit."""
        return self.calls_per_minute is not None or self.bound_tokens

    @property
    def bound_tokens(self) -> bool:
        """Whether the tokens of each call must be counted."""
        return any(
            limit is not None for limit in (self.tokens_per_minute, self.tokens_per_day, self.tokens_per_month)
        )

    @property
    def stored(self) -> dict[str, Any] | None:
        """The limits as the store holds them; None without any."""
        return self.model_dump(exclude_none=True) if self.bound_calls else None


class GivenLimits(UsageLimits):
    """Limits as a request gives them: numbers must be numbers, not texts."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class LimitSettings(UsageLimits):
    """The limits of a run. `share` is no bound."""

    max_waiting: NonNegativeInt | None = None
    """While more trajectories than this wait for the trainer, no session is opened for training."""
    share: float = Field(default=1.0, ge=0.01, le=100.0)
    """Weight of the run at engines that have more calls than they can run at once: of two runs whose calls wait, the
    one with twice the weight gets twice the time of the engine. A run alone gets all of it, whatever its weight."""
