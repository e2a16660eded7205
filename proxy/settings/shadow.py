"""Settings of a run for shadow answers."""

from __future__ import annotations

from pydantic import Field, PositiveFloat

from proxy.settings.section import Section


class ShadowSettings(Section):
    """Further answers to the prompts of agents, which no agent sees. They are generated in spare capacity alone."""

    share: float = Field(default=0.0, ge=0.0, le=1.0)
    """Share of the calls that get shadow answers; 0: none."""
    samples: int = Field(default=3, ge=1, le=16)
    """Number of shadow answers to such a call."""
    busy_share: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Shadow answers are generated while calls hold at most this share of the engine's slots; 0: while the engine has
    no calls."""
    wait_seconds: PositiveFloat = Field(default=60.0, le=3600.0)
    """A shadow answer that is not complete so long after the call's own answer is dropped."""
