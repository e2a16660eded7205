"""Settings of the algorithm: a preset, the parts that replace those of the preset, rewards and filters."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from trainer.config.parts import (
    Baseline,
    Correction,
    Denominator,
    Divergence,
    Proximal,
    Scale,
    Surrogate,
    TaskBy,
    Truncated,
    TruncatedSampling,
)
from trainer.config.section import AboveOnePart, Clearable, PositivePart, Section
from trainer.user_code import FunctionInFile


class FilterAction(StrEnum):
    """The treatment of an answer that a filter catches: mask its tokens, or drop its whole trajectory."""

    MASK = "mask"
    DROP = "drop"


class RewardSettings(Section):
    """The reward that the algorithm sees: `scale × (clip(r, low, high) + bias)`, for sessions and turns alike."""

    low: Annotated[float | None, Clearable] = None
    high: Annotated[float | None, Clearable] = None
    bias: float = 0.0
    scale: PositiveFloat = 1.0

    @model_validator(mode="after")
    def _consistent(self) -> RewardSettings:
        if self.low is not None and self.high is not None and self.low >= self.high:
            raise ValueError(f"low ({self.low}) must be below high ({self.high})")
        return self


class FilterSettings(Section):
    """Bounds beyond which an answer counts as repetitive or as gibberish (`batching/filters.py`); None: no bound."""

    repeated_share: Annotated[float, Field(gt=0, lt=1)] | None = None
    """An answer is repetitive if a larger share of its n-grams already occurred earlier in it."""
    repeated_ngram: Annotated[int, Field(ge=1, le=64)] = 8
    """The n of these n-grams, in tokens."""
    certain_tokens: PositiveInt | None = None
    """An answer is repetitive if this many consecutive tokens were each drawn with more than `certain_probability`.
    """
    certain_probability: Annotated[float, Field(gt=0, lt=1)] = 0.99
    gibberish_logprob: Annotated[float, Field(lt=0)] | None = None
    """An answer is gibberish if the mean log-probability of `gibberish_window` consecutive tokens is lower."""
    gibberish_window: PositiveInt = 32
    action: FilterAction = FilterAction.MASK

    @property
    def is_on(self) -> bool:
        bounds = (self.repeated_share, self.certain_tokens, self.gibberish_logprob)
        return any(bound is not None for bound in bounds)

    @model_validator(mode="after")
    def _consistent(self) -> FilterSettings:
        needs = {
            "repeated_ngram": self.repeated_share is not None,
            "certain_probability": self.certain_tokens is not None,
            "gibberish_window": self.gibberish_logprob is not None,
            "action": self.is_on,
        }
        bounds = {
            "repeated_ngram": "repeated_share",
            "certain_probability": "certain_tokens",
            "gibberish_window": "gibberish_logprob",
            "action": "one of repeated_share, certain_tokens and gibberish_logprob",
        }
        for name, is_used in needs.items():
            if not is_used and getattr(self, name) != FilterSettings.model_fields[name].default:
                raise ValueError(f"{name} changes nothing without a bound: set {bounds[name]}, or leave it out")
        return self


class AlgorithmSettings(Section):
    """A preset, and parts that replace those of the preset. None: the preset's own; "none" switches a part off."""

    preset: str = "grpo"
    loss: FunctionInFile | None = None
    advantage: FunctionInFile | None = None
    filter: FunctionInFile | None = None
    surrogate: Surrogate | None = None
    baseline: Baseline | None = None
    scale: Scale | None = None
    clip_low: Annotated[float, Field(gt=0, lt=1)] | None = None
    clip_high: PositiveFloat | None = None
    dual_clip: AboveOnePart | None = None
    gate_positive: PositiveFloat | None = None
    gate_negative: PositiveFloat | None = None
    importance_cap: Annotated[float, Field(ge=1)] | None = None
    correction: Correction | None = None
    correction_low: Annotated[float, Field(ge=0, le=1)] | None = None
    correction_high: Annotated[float, Field(ge=1)] | None = None
    veto: Annotated[float, Field(gt=0, lt=1)] | None = None
    proximal: Proximal | None = None
    second_moment: PositivePart | None = None
    denominator: Denominator | None = None
    constant_tokens: PositiveInt | None = None
    drop_degenerate: bool | None = None
    fill: bool | None = None
    mini_batches: Annotated[int, Field(ge=1, le=64)] | None = None
    kl_coefficient: NonNegativeFloat | None = None
    kl_form: Divergence | None = None
    entropy_coefficient: NonNegativeFloat | None = None
    router_aux_coefficient: NonNegativeFloat | None = None
    top_entropy_share: Annotated[float, Field(gt=0, le=1)] | None = None
    rl_coefficient: NonNegativeFloat | None = None
    distill_coefficient: NonNegativeFloat | None = None
    hindsight_coefficient: NonNegativeFloat | None = None
    hindsight_clip: PositiveFloat | None = None
    hindsight_floor: NonNegativeFloat | None = None
    turn_discount: Annotated[float, Field(gt=0, le=1)] | None = None
    gae_lambda: Annotated[float, Field(ge=0, le=1)] | None = None
    discount: Annotated[float, Field(gt=0, le=1)] | None = None
    value_clip: PositivePart | None = None
    critic_rate: PositiveFloat | None = None
    critic_warmup: NonNegativeInt | None = None
    running_mean_decay: Annotated[float, Field(ge=0, lt=1)] | None = None
    task_by: TaskBy | None = None
    overlong_factor: NonNegativeFloat | None = None
    overlong_tokens: PositiveInt | None = None
    overlong_tail: PositiveInt | None = None
    truncated: Truncated | None = None
    truncated_sampling: TruncatedSampling | None = None
    reward: RewardSettings = RewardSettings()
    filters: FilterSettings = FilterSettings()

    @property
    def learns_entropy(self) -> bool:
        """Return whether the loss can have a gradient through the policy's entropies. No preset has one by itself."""
        return bool(self.entropy_coefficient) or self.loss is not None
