"""Settings of the optimiser."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from trainer.config.section import Clearable, Section
from trainer.errors import ConfigurationError


class LearningRate(StrEnum):
    """The course of the learning rate after the warm-up: constant, linear to its minimum, or half a cosine to its
    minimum."""

    CONSTANT = "constant"
    LINEAR = "linear"
    COSINE = "cosine"


class OptimizerSettings(Section):
    """AdamW with a linear warm-up and an optional decay of the learning rate after it."""

    learning_rate: PositiveFloat = 1e-6
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.95)
    eps: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.0
    warmup_steps: NonNegativeInt = 0
    """Number of the first step with the full learning rate; 0 and 1: no warm-up."""
    schedule: LearningRate = LearningRate.CONSTANT
    total_steps: PositiveInt | None = None
    """Optimiser steps, counted from version 0, after which the rate stays at its minimum. None: the number of steps
    of a `fit`; a trainer has no last step and needs a number."""
    minimum_share: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """Minimum of the learning rate, as a share of the full one."""
    clip_norm: PositiveFloat = 1.0
    skip_norm: Annotated[PositiveFloat | None, Clearable] = None
    """A gradient with a larger norm is skipped, like one that is not finite; None: no finite gradient is skipped."""
    pause_after: PositiveInt = 3
    """Consecutive batches without a usable gradient, after which the trainer pauses the run."""

    @model_validator(mode="after")
    def _consistent(self) -> OptimizerSettings:
        if self.schedule is LearningRate.CONSTANT:
            for option in ("total_steps", "minimum_share"):
                # By value: a step's record, which replay reads, gives every option.
                if getattr(self, option) != type(self).model_fields[option].default:
                    raise ValueError(
                        f"{option} says how the learning rate goes down, which schedule = constant does not; set"
                        " schedule to linear or cosine, or leave it out"
                    )
        elif self.total_steps is not None and self.warmup_steps >= self.total_steps:
            raise ValueError(
                f"warmup_steps ({self.warmup_steps}) must be below total_steps ({self.total_steps}): the rate goes"
                " down behind the warm-up"
            )
        return self

    def check_end(self) -> None:
        """Raise ConfigurationError if the learning rate of a trainer decays without an end of the decay."""
        if self.schedule is not LearningRate.CONSTANT and self.total_steps is None:
            raise ConfigurationError(
                f"trainer.optimizer.total_steps: schedule = {self.schedule.value} needs it: how many optimiser steps"
                " the run will take; a trainer does not stop by itself"
            )
