"""Settings of the model that is trained and of those it learns from: adapter, reference and teacher."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt, SecretStr, model_validator

from trainer.config.section import Section


class Precision(StrEnum):
    """The precision of forward and backward passes. Weights, gradients and optimiser state are float32 in any
    case."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


class Attention(StrEnum):
    """How attention under a mask is computed (`models/attention.py`): `whole` computes every pair of tokens,
    `blocks` only the blocks of the mask that are not empty, and `auto` takes `blocks` if the model supports it."""

    AUTO = "auto"
    WHOLE = "whole"
    BLOCKS = "blocks"


class PipelineSchedule(StrEnum):
    """The order in which the stages of a pipeline compute micro-batches (`parallel/pipeline.py`)."""

    ONE_F_ONE_B = "1f1b"
    INTERLEAVED = "interleaved"
    ZBV = "zbv"


class AdapterPublish(StrEnum):
    """The content of a version's directory: the adapter alone, or whole weights with the adapter merged into them,
    which every engine can load, and the adapter beside them."""

    ADAPTER = "adapter"
    MERGED = "merged"


class AdapterSettings(Section):
    """LoRA: the base model's weights stay fixed, and a low-rank difference to them is trained."""

    rank: PositiveInt = 16
    alpha: PositiveFloat = 32.0
    """The difference is scaled by alpha / rank."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout of the adapter's inputs, in passes with a gradient."""
    targets: Literal["all-linear"] | Annotated[tuple[str, ...], Field(min_length=1)] = "all-linear"
    """Names of linear layers, or endings of such names; "all-linear": all but the output head."""
    publish: AdapterPublish = AdapterPublish.ADAPTER


class ReferenceSettings(Section):
    """The model that a `kl_coefficient` above 0 keeps the policy close to. With neither option set: the base model,
    fixed."""

    reset_every: PositiveInt | None = None
    """Every this many optimiser steps, the reference is set to the current policy."""
    ema: Annotated[float, Field(gt=0, lt=1)] | None = None
    """The reference is a moving average of the policy, of which this share remains after each optimiser step."""

    @property
    def follows(self) -> bool:
        """Return whether the reference moves with the policy."""
        return self.reset_every is not None or self.ema is not None

    @model_validator(mode="after")
    def _consistent(self) -> ReferenceSettings:
        if self.reset_every is not None and self.ema is not None:
            raise ValueError("reset_every and ema are two ways to move the reference; leave one of them out")
        return self


class TeacherSettings(Section):
    """The engine of another model, from which the policy learns if `distill_coefficient` is above 0."""

    url: str | None = None
    """Address of the engine, which must speak SGLang's API."""
    api_key: SecretStr = SecretStr("")
    tokenizer: Path | None = None
    """Directory with the teacher's tokenizer.json; None: the directory of its model, as the engine reports it."""
    concurrency: Annotated[int, Field(ge=1, le=256)] = 8
    """Sequences that are scored at one time."""
    timeout_seconds: PositiveFloat = 300.0
