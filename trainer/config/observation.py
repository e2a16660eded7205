"""Settings of what is measured and recorded of steps."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveInt, model_validator

from trainer.config.section import Section


class SinkName(StrEnum):
    """Where the metrics of steps go besides the store: packages that are installed by an extra of the same name."""

    TENSORBOARD = "tensorboard"
    WANDB = "wandb"
    MLFLOW = "mlflow"
    TRACKIO = "trackio"


class MismatchSettings(Section):
    """Bounds on how far the engine's log-probabilities may be from the trainer's at one version (`watch.py`)."""

    warn_above: NonNegativeFloat = 0.1
    """Nats: mean absolute difference over the tokens of the head's own version; 0: no warning."""
    pause_above: NonNegativeFloat = 0.5
    """Nats, of the same mean; 0: the run is not paused."""
    steps: PositiveInt = 3
    """Steps in a row above a bound, after which it acts."""

    @model_validator(mode="after")
    def _consistent(self) -> MismatchSettings:
        if self.pause_above and self.warn_above > self.pause_above:
            raise ValueError(
                f"warn_above ({self.warn_above}) cannot exceed pause_above ({self.pause_above}), or the run is paused"
                " before anything is said"
            )
        return self


class AuditSettings(Section):
    """What is kept of a step to explain it, besides the figures of each trajectory."""

    sample: Annotated[int, Field(ge=0, le=256)] = 4
    """Of this many trajectories a step, every trained token: the one whose log-probabilities differ most from the
    engine's, and others by chance."""


class WandbSettings(Section):
    """Weights & Biases; its key is where `wandb login` or WANDB_API_KEY left it."""

    entity: str | None = None
    """The user or team; None: the key's own."""
    mode: Literal["online", "offline"] = "online"
    """Offline: into files, which `wandb sync` sends later."""


class MlflowSettings(Section):
    tracking_uri: str | None = None
    """None: MLFLOW_TRACKING_URI, or an SQLite file in the sinks' directory."""


class MetricsSettings(Section):
    """Where the metrics of steps go besides the store and Prometheus. What one of these does, or does not do, never
    keeps the trainer waiting."""

    sinks: tuple[SinkName, ...] = ()
    directory: Path = Path(".base-rl/metrics")
    """Files of theirs: one directory per sink."""
    project: Annotated[str, Field(min_length=1)] = "base-rl"
    """The project in W&B and Trackio, the experiment in MLflow."""
    wandb: WandbSettings = WandbSettings()
    mlflow: MlflowSettings = MlflowSettings()

    @model_validator(mode="after")
    def _consistent(self) -> MetricsSettings:
        if len(set(self.sinks)) != len(self.sinks):
            raise ValueError("sinks names one twice")
        for sink in (SinkName.WANDB, SinkName.MLFLOW):
            if sink.value in self.model_fields_set and sink not in self.sinks:
                raise ValueError(f"{sink.value} is set up, and is not one of sinks")
        if "project" in self.model_fields_set and not set(self.sinks) - {SinkName.TENSORBOARD}:
            raise ValueError("project is for wandb, mlflow and trackio, none of which is one of sinks")
        return self


class ProfileSettings(Section):
    """A trace of some steps by torch's profiler."""

    steps: Annotated[int, Field(ge=0, le=100)] = 0
    """How many steps; 0: none."""
    first: PositiveInt = 2
    """The first of them, counted from the trainer's start; the very first step does much that no other does."""
    directory: Path = Path(".base-rl/profiles")
