"""Actors that `base-rl up --ray` places on a Ray cluster."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from proxy.settings.placement import PlacementSettings


class RaySettings(PlacementSettings):
    """The actors of one run: one for each engine, one for each rank of the trainer. All nodes see the data directory,
    the model and the configuration under the same paths, and have base-rl installed."""

    engine_resources: dict[str, PositiveFloat] = Field(default_factory=dict)
    """Further resources of an engine, by the names that nodes were started with."""
    trainer_resources: dict[str, PositiveFloat] = Field(default_factory=dict)
    """Further resources of the trainer on each of its nodes."""
    max_engines: PositiveInt | None = None
    """Most engines. If it is set, engines are added while calls queue and removed when they are idle."""
    min_engines: PositiveInt = 1
    """Number of engines below which idle ones are not removed."""
    calls_per_engine: PositiveInt = 64
    """Calls under way per engine above which, after ten seconds, another one is added."""
    idle_seconds: PositiveFloat = 300.0
    """Seconds without a call after which an engine is drained and removed."""
    stop_seconds: Annotated[int, Field(ge=10, le=3600)] = 120
    """Seconds for the calls under way, and for the trainer to give claims back, when the command is ended."""
    max_restarts: NonNegativeInt = 20
    """How often an engine or the trainer is started again after a failure. Lost actors and nodes do not count."""

    @model_validator(mode="after")
    def _bounds_are_in_order(self) -> RaySettings:
        if self.max_engines is not None and self.max_engines < self.min_engines:
            raise ValueError(f"max_engines is {self.max_engines}, less than min_engines, {self.min_engines}")
        return self
