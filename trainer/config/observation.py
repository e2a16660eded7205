"""Settings of metrics, audits, warnings and profiles."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveInt, model_validator

from trainer.config.section import Section


class SinkName(StrEnum):
    """Destinations of step metrics besides the store. Each needs the package extra of the same name."""

    TENSORBOARD = "tensorboard"
    WANDB = "wandb"
    MLFLOW = "mlflow"
    TRACKIO = "trackio"


class MismatchSettings(Section):
    """Bounds on how far the engine's log-probabilities may be from the trainer's at one version (`watch.py`)."""

    warn_above: NonNegativeFloat = 0.1
    """Mean absolute difference, in nats, over the tokens of the head's own version; 0: no warning."""
    pause_above: NonNegativeFloat = 0.5
    """Bound in nats of the same mean, above which the run is paused; 0: it is not."""
    steps: PositiveInt = 3
    """Consecutive steps above a bound before it takes effect."""

    @model_validator(mode="after")
    def _consistent(self) -> MismatchSettings:
        if self.pause_above and self.warn_above > self.pause_above:
            raise ValueError(
                f"warn_above ({self.warn_above}) cannot exceed pause_above ({self.pause_above}), or the run is paused"
                " before anything is said"
            )
        return self


class AuditSettings(Section):
    """The tokens of a step that are recorded to explain it, besides the figures of each trajectory."""

    sample: Annotated[int, Field(ge=0, le=256)] = 4
    """Number of trajectories per step of which every trained token is recorded: the one whose log-probabilities
    differ most from the engine's, and others at random."""


class WandbSettings(Section):
    """Weights & Biases. Its key is taken from `wandb login` or WANDB_API_KEY."""

    entity: str | None = None
    """User or team; None: that of the key."""
    mode: Literal["online", "offline"] = "online"
    """`offline` writes files, which `wandb sync` sends later."""


class MlflowSettings(Section):
    tracking_uri: str | None = None
    """None: MLFLOW_TRACKING_URI, or an SQLite file in the sinks' directory."""


class MetricsSettings(Section):
    """Destinations of step metrics besides the store and Prometheus. The trainer never waits for one."""

    sinks: tuple[SinkName, ...] = ()
    directory: Path = Path(".base-rl/metrics")
    """Directory of their files, with one folder per destination."""
    project: Annotated[str, Field(min_length=1)] = "base-rl"
    """Project in W&B and Trackio, experiment in MLflow."""
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
    """Number of steps to trace; 0: none."""
    first: PositiveInt = 2
    """First step to trace, counted from the trainer's start. The very first one does extra work, such as compiling.
    """
    directory: Path = Path(".base-rl/profiles")
