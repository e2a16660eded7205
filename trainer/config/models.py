"""Settings of the model that is trained and of those it learns from: adapter, reference and teacher."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt, SecretStr, model_validator

from trainer.config.section import Section


class Precision(StrEnum):
    """What forward and backward compute in. Weights, gradients and optimiser state are float32 in both."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


class Attention(StrEnum):
    """How attention under a mask is computed (`models/attention.py`): whole; by those blocks of it in which something
    is seen; or by blocks where the model can."""

    AUTO = "auto"
    WHOLE = "whole"
    BLOCKS = "blocks"


class PipelineSchedule(StrEnum):
    """In which order the stages of a pipeline compute micro-batches (`parallel/pipeline.py`)."""

    ONE_F_ONE_B = "1f1b"
    INTERLEAVED = "interleaved"
    ZBV = "zbv"


class AdapterPublish(StrEnum):
    """What a version's directory holds: the adapter alone, or whole weights with the adapter merged into them, which
    every engine serves, and the adapter beside."""

    ADAPTER = "adapter"
    MERGED = "merged"


class AdapterSettings(Section):
    """LoRA: the base model's weights stay as they are, and a low-rank difference to them is trained."""

    rank: PositiveInt = 16
    alpha: PositiveFloat = 32.0
    """The difference is scaled by alpha / rank."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Of what the adapter reads, in passes that learn."""
    targets: Literal["all-linear"] | Annotated[tuple[str, ...], Field(min_length=1)] = "all-linear"
    """Names of linear layers, or ends of them; "all-linear": all but the output head."""
    publish: AdapterPublish = AdapterPublish.ADAPTER


class ReferenceSettings(Section):
    """What the policy is held to where `kl_coefficient` is above 0. Neither chosen: the base model, for ever."""

    reset_every: PositiveInt | None = None
    """Optimiser steps after which the reference becomes the policy as it then is."""
    ema: Annotated[float, Field(gt=0, lt=1)] | None = None
    """The reference is an average of the policy: each optimiser step leaves it this share of itself."""

    @property
    def follows(self) -> bool:
        """Whether the reference moves with the policy."""
        return self.reset_every is not None or self.ema is not None

    @model_validator(mode="after")
    def _consistent(self) -> ReferenceSettings:
        if self.reset_every is not None and self.ema is not None:
            raise ValueError("reset_every and ema are two ways to move the reference; leave one of them out")
        return self


class TeacherSettings(Section):
    """An engine that serves another model, which the policy learns from where `distill_coefficient` is above 0."""

    url: str | None = None
    """Its address; it speaks as SGLang does."""
    api_key: SecretStr = SecretStr("")
    tokenizer: Path | None = None
    """A directory with its tokenizer.json; None: where the engine says that its model is."""
    concurrency: Annotated[int, Field(ge=1, le=256)] = 8
    """Sequences that it is asked about at a time."""
    timeout_seconds: PositiveFloat = 300.0
