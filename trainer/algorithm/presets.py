"""Algorithms by name: each is one row of parts, and a user may change any part."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from pydantic import TypeAdapter, ValidationError

from trainer.config import AlgorithmSettings, Baseline, Denominator, Proximal, RewardSettings, Scale
from trainer.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True, slots=True)
class Algorithm:
    """The parts of a policy-gradient algorithm.

    `dual_clip` bounds the loss of tokens with a negative advantage (None: it does not). `importance_cap` truncates
    the weight exp(proximal − behaviour). `turn_discount` is per turn between a turn and the end of its path.
    `running_mean_decay` is per trajectory.
    """

    baseline: Baseline
    scale: Scale
    clip_low: float
    clip_high: float
    dual_clip: float | None
    importance_cap: float
    proximal: Proximal
    denominator: Denominator
    turn_discount: float
    running_mean_decay: float
    reward: RewardSettings


PRESETS: dict[str, Algorithm] = {
    # Shao et al. 2024 (DeepSeekMath), with the asymmetric clip and token mean of Yu et al. 2025 (DAPO) and the
    # decoupled objective of Fu et al. 2025 (AReaL) for trajectories of older versions.
    "grpo": Algorithm(
        baseline=Baseline.GROUP_MEAN,
        scale=Scale.GROUP_STD,
        clip_low=0.2,
        clip_high=0.28,
        dual_clip=None,
        importance_cap=2.0,
        proximal=Proximal.RECOMPUTE,
        denominator=Denominator.TOKENS,
        turn_discount=1.0,
        running_mean_decay=0.99,
        reward=RewardSettings(),
    ),
}

_PARTS: TypeAdapter[Algorithm] = TypeAdapter(Algorithm)
_GROUP_BASELINES = (Baseline.GROUP_MEAN, Baseline.LEAVE_ONE_OUT)


def as_json(algorithm: Algorithm) -> dict[str, Any]:
    """The parts by name, in JSON's types."""
    return cast("dict[str, Any]", _PARTS.dump_python(algorithm, mode="json"))


def from_json(parts: Mapping[str, Any]) -> Algorithm:
    """Raises ConfigurationError for parts that are not those of this version's algorithms."""
    try:
        return _PARTS.validate_python(parts)
    except ValidationError as error:
        raise ConfigurationError(f"these are not the parts of an algorithm as they are now: {error}") from error


def resolve(settings: AlgorithmSettings) -> Algorithm:
    """The preset with the settings' own parts laid over it.

    Raises ConfigurationError for a preset that does not exist or parts that contradict each other.
    """
    preset = PRESETS.get(settings.preset)
    if preset is None:
        raise ConfigurationError(f"trainer.algorithm.preset: {settings.preset!r} is not one of: {', '.join(PRESETS)}")
    parts = {
        field.name: value
        for field in dataclasses.fields(Algorithm)
        if (value := getattr(settings, field.name)) is not None
    }
    algorithm = dataclasses.replace(preset, **parts)
    if algorithm.scale is Scale.GROUP_STD and algorithm.baseline not in _GROUP_BASELINES:
        raise ConfigurationError(
            f"trainer.algorithm.scale: group_std divides by the spread around a group's own mean, which baseline"
            f" {algorithm.baseline.value} does not use; choose batch_std or none, or a group baseline"
        )
    if algorithm.dual_clip is not None and algorithm.dual_clip <= 1 + algorithm.clip_high:
        raise ConfigurationError(
            f"trainer.algorithm.dual_clip: {algorithm.dual_clip} must be above 1 + clip_high"
            f" ({1 + algorithm.clip_high}), or it would cut the ratios that the clip range allows"
        )
    return algorithm
