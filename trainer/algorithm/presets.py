"""Algorithms by name: each preset is one row of parts, and a user may change any part."""

from __future__ import annotations

import dataclasses
from typing import Any

from trainer.algorithm.contradictions import dead_parts, refuse_contradictions, refuse_unused
from trainer.algorithm.parts import Algorithm
from trainer.config import (
    AlgorithmSettings,
    Baseline,
    Correction,
    Denominator,
    Divergence,
    Proximal,
    RewardSettings,
    Scale,
    Surrogate,
    Truncated,
    TruncatedSampling,
    is_cleared,
)
from trainer.errors import ConfigurationError

_GRPO = Algorithm(
    baseline=Baseline.GROUP_MEAN,
    scale=Scale.GROUP_STD,
    clip_low=0.2,
    clip_high=0.28,
    dual_clip=None,
    importance_cap=2.0,
    # With `truncate`, a policy that drifts from what the engine serves does not come back.
    correction=Correction.SIGNED_TRUNCATE,
    proximal=Proximal.RECOMPUTE,
    denominator=Denominator.TOKENS,
    # With one step every ratio is 1 and no clip acts. Two steps reach a reward in fewer batches than one.
    mini_batches=2,
    turn_discount=1.0,
    running_mean_decay=0.99,
    truncated=Truncated.MASK,
    truncated_sampling=TruncatedSampling.MASK,
    reward=RewardSettings(),
)

_row = dataclasses.replace

PRESETS: dict[str, Algorithm] = {
    # Shao et al. 2024 (DeepSeekMath), with the asymmetric clip and token mean of Yu et al. 2025 (DAPO) and the
    # decoupled objective of Fu et al. 2025 (AReaL) for trajectories of older versions.
    "grpo": _GRPO,
    # Yu et al. 2025: groups without signal do not count, and answers near the bound are penalised. The penalty is
    # largest for answers that were cut, so these are trained, as in the authors' final recipe.
    "dapo": _row(_GRPO, drop_degenerate=True, fill=True, overlong_factor=1.0, truncated=Truncated.TRAIN),
    # Liu et al. 2025: the weight of an answer depends neither on the spread of its group nor on its length.
    "dr_grpo": _row(_GRPO, scale=Scale.NONE, denominator=Denominator.CONSTANT),
    # Zheng et al. 2025 (Qwen): one ratio per answer.
    "gspo": _row(
        _GRPO,
        surrogate=Surrogate.SEQUENCE_CLIP,
        clip_low=3e-4,
        clip_high=4e-4,
        denominator=Denominator.ANSWERS,
    ),
    # Ahmadian et al. 2024: the rest of the group is the baseline, all answers of a session are one action, and plain
    # REINFORCE needs no clip. A divergence from the base model is a part of the reward.
    "rloo": _row(
        _GRPO,
        surrogate=Surrogate.RATIO,
        baseline=Baseline.LEAVE_ONE_OUT,
        scale=Scale.NONE,
        denominator=Denominator.SEQUENCES,
        mini_batches=1,
        kl_form=Divergence.K1,
    ),
    # Liu et al. 2025 (Tricks or Traps): the group's mean, the batch's spread.
    "lite_ppo": _row(_GRPO, scale=Scale.BATCH_STD),
    # Hu et al. 2025: no groups; the reward of each token, minus its divergence from the base model, is normalised
    # over all tokens of the batch.
    "reinforce_pp": _row(
        _GRPO,
        baseline=Baseline.BATCH_MEAN,
        scale=Scale.TOKEN_STD,
        kl_coefficient=0.01,
        kl_form=Divergence.K1,
    ),
    # MiniMax 2025 (M1): the truncated weight against the behaviour policy, and every token keeps its gradient. The
    # paper does not give the bound; this one is from Khatri et al. 2025 (ScaleRL), where 4 to 8 did equally well.
    "cispo": _row(_GRPO, surrogate=Surrogate.TRUNCATED, proximal=Proximal.BEHAVIOUR, clip_low=0.99, clip_high=4.0),
    # Gao et al. 2025 (Qwen): a soft gate on the ratio to the behaviour policy, the mean of each answer's mean.
    "sapo": _row(
        _GRPO,
        surrogate=Surrogate.GATED,
        proximal=Proximal.BEHAVIOUR,
        denominator=Denominator.ANSWERS,
    ),
    # Zheng et al. 2025: the ratio to the behaviour policy, with a bound on its second moment instead of a clip.
    "m2po": _row(_GRPO, surrogate=Surrogate.RATIO, proximal=Proximal.BEHAVIOUR, second_moment=0.04, mini_batches=1),
    # Schulman et al. 2017, with the advantages of Schulman et al. 2016: a critic estimates the value of each token.
    "ppo": _row(_GRPO, baseline=Baseline.CRITIC, scale=Scale.BATCH_STD, value_clip=0.2),
    # Agarwal et al. 2024 (GKD, on-policy with the reverse divergence): a teacher judges the policy's own answers
    # token by token. Rewards are not used. Cut answers are trained: how an answer ended does not matter here.
    "distillation": _row(
        _GRPO,
        baseline=Baseline.NONE,
        scale=Scale.NONE,
        mini_batches=1,
        correction=Correction.TRUNCATE,  # a divergence has no advantage, whose sign could matter
        rl_coefficient=0.0,
        distill_coefficient=1.0,
        truncated=Truncated.TRAIN,
    ),
}


def resolve(settings: AlgorithmSettings) -> Algorithm:
    """Return the preset that the settings name, with the parts that they change.

    Raises ConfigurationError for an unknown preset, for parts that contradict each other, and for a given part that
    would change nothing.
    """
    preset = PRESETS.get(settings.preset)
    if preset is None:
        raise ConfigurationError(f"trainer.algorithm.preset: {settings.preset!r} is not one of: {', '.join(PRESETS)}")
    parts: dict[str, Any] = {
        field.name: None if is_cleared(value) else value
        for field in dataclasses.fields(Algorithm)
        if (value := getattr(settings, field.name)) is not None
    }
    algorithm = dataclasses.replace(preset, **parts)
    refuse_unused(settings, algorithm)
    refuse_contradictions(algorithm)
    return algorithm


def warnings(settings: AlgorithmSettings) -> list[str]:
    """Describe the parts of the preset that cannot act with what the settings change, for the log at start."""
    found: dict[str, list[str]] = {}
    for name, reason in dead_parts(PRESETS[settings.preset], resolve(settings)).items():
        found.setdefault(reason, []).append(name)
    return [f"{', '.join(names)} of preset {settings.preset}: {reason}" for reason, names in found.items()]
