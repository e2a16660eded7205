"""Actors that `base-rl up --ray` places on a Ray cluster."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, NonNegativeInt, PositiveFloat

from proxy.settings.placement import PlacementSettings


class RaySettings(PlacementSettings):
    """The actors of one run: one for each engine, one for each rank of the trainer. All nodes see the data directory,
    the model and the configuration under the same paths, and have base-rl installed."""

    engine_resources: dict[str, PositiveFloat] = Field(default_factory=dict)
    """Further resources of an engine, by the names that nodes were started with."""
    trainer_resources: dict[str, PositiveFloat] = Field(default_factory=dict)
    """Further resources of the trainer on each of its nodes."""
    stop_seconds: Annotated[int, Field(ge=10, le=3600)] = 120
    """Seconds for the calls under way, and for the trainer to give claims back, when the command is ended."""
    max_restarts: NonNegativeInt = 20
    """How often an engine or the trainer is started again after a failure. Lost actors and nodes do not count."""
