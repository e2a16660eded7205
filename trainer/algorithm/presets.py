"""Algorithms by name: each is one row of parts, and a user may change any part."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from pydantic import TypeAdapter, ValidationError

from trainer.algorithm.objective import Objective
from trainer.config import (
    AlgorithmSettings,
    Baseline,
    Denominator,
    Divergence,
    Proximal,
    RewardSettings,
    Scale,
    Surrogate,
    TeacherSettings,
)
from trainer.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True, slots=True)
class Algorithm:
    """The parts of a policy-gradient algorithm. Those with a default came later: without them a part is as it was.

    `dual_clip` bounds the loss of tokens with a negative advantage (None: it does not). `gate_positive` and
    `gate_negative` are the temperatures of the gated surrogate. `importance_cap` truncates the weight
    exp(proximal − behaviour). Tokens furthest from the behaviour policy are left out until the mean square of
    log(proximal / behaviour) is `second_moment` at most (None: none are). `constant_tokens` is the length of the
    constant denominator. With `drop_degenerate`, trajectories without an advantage do not count in the denominator.
    A batch is learnt from in `mini_batches` optimiser steps. `kl_coefficient` times the divergence from the base
    model is added to the loss or, with k1, taken from each token's advantage together with that of the tokens after
    it in its answer. With a teacher the loss is `rl_coefficient` times all that plus `distill_coefficient` times the
    divergence from it (`algorithm/imitation.py`). `turn_discount` is per turn between a turn and the end of its path.
    With a critic, `gae_lambda` and `discount` are per token (`algorithm/gae.py`); its values may leave those at the
    start of the step by `value_clip` (None: by any); its learning rate is the policy's times `critic_rate`; it learns
    alone in its first `critic_warmup` steps. `running_mean_decay` is per trajectory. A session whose longest answer
    comes within `overlong_tail` tokens of `overlong_tokens` loses reward, `overlong_factor` at the most.
    """

    surrogate: Surrogate = Surrogate.CLIP
    baseline: Baseline
    scale: Scale
    clip_low: float
    clip_high: float
    dual_clip: float | None
    gate_positive: float = 1.0
    gate_negative: float = 1.05
    importance_cap: float
    proximal: Proximal
    second_moment: float | None = None
    denominator: Denominator
    constant_tokens: int = 1024
    drop_degenerate: bool = False
    mini_batches: int = 1
    kl_coefficient: float = 0.0
    kl_form: Divergence = Divergence.K3
    rl_coefficient: float = 1.0
    distill_coefficient: float = 0.0
    turn_discount: float
    gae_lambda: float = 1.0
    discount: float = 1.0
    value_clip: float | None = None
    critic_rate: float = 1.0
    critic_warmup: int = 0
    running_mean_decay: float
    overlong_factor: float = 0.0
    overlong_tokens: int = 1024
    overlong_tail: int = 256
    reward: RewardSettings

    @property
    def objective(self) -> Objective:
        return Objective(**{field.name: getattr(self, field.name) for field in dataclasses.fields(Objective)})

    @property
    def looks_first(self) -> bool:
        """Whether the weights at the start of the step are asked about the whole batch before the first gradient."""
        return (
            self.mini_batches > 1
            or self.second_moment is not None
            or (self.has_critic and self.pays_divergence_in_reward)
        )

    @property
    def has_critic(self) -> bool:
        return self.baseline is Baseline.CRITIC

    @property
    def has_reference(self) -> bool:
        return self.kl_coefficient > 0

    @property
    def has_teacher(self) -> bool:
        return self.distill_coefficient > 0

    @property
    def learns_from_rewards(self) -> bool:
        return self.rl_coefficient > 0

    @property
    def pays_divergence_in_reward(self) -> bool:
        return self.has_reference and self.kl_form is Divergence.K1

    def learns_from(self, advantages: Iterable[float]) -> bool:
        """Whether a sequence with answers of these advantages has a gradient."""
        always = self.has_critic or self.has_teacher or (self.has_reference and not self.drop_degenerate)
        return always or any(advantages)


_GRPO = Algorithm(
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
)

_row = dataclasses.replace

PRESETS: dict[str, Algorithm] = {
    # Shao et al. 2024 (DeepSeekMath), with the asymmetric clip and token mean of Yu et al. 2025 (DAPO) and the
    # decoupled objective of Fu et al. 2025 (AReaL) for trajectories of older versions.
    "grpo": _GRPO,
    # Yu et al. 2025: groups that teach nothing do not count, answers near the bound are penalised.
    "dapo": _row(_GRPO, drop_degenerate=True, overlong_factor=1.0),
    # Liu et al. 2025: neither the spread of a group nor the length of an answer changes what it weighs.
    "dr_grpo": _row(_GRPO, scale=Scale.NONE, denominator=Denominator.CONSTANT),
    # Zheng et al. 2025 (Qwen): one ratio per answer.
    "gspo": _row(
        _GRPO,
        surrogate=Surrogate.SEQUENCE_CLIP,
        clip_low=3e-4,
        clip_high=4e-4,
        denominator=Denominator.ANSWERS,
    ),
    # Ahmadian et al. 2024: the others of the group are the baseline.
    "rloo": _row(_GRPO, baseline=Baseline.LEAVE_ONE_OUT, scale=Scale.NONE),
    # Liu et al. 2025 (Tricks or Traps): the group's mean, the batch's spread.
    "lite_ppo": _row(_GRPO, scale=Scale.BATCH_STD),
    # Hu et al. 2025: no groups; what keeps the policy near the base model is a part of the reward of each token.
    "reinforce_pp": _row(
        _GRPO,
        baseline=Baseline.BATCH_MEAN,
        scale=Scale.BATCH_STD,
        kl_coefficient=0.01,
        kl_form=Divergence.K1,
    ),
    # MiniMax 2025 (M1): the truncated weight against the policy that acted, and every token keeps its gradient.
    "cispo": _row(_GRPO, surrogate=Surrogate.TRUNCATED, proximal=Proximal.BEHAVIOUR, clip_low=0.99, clip_high=1.0),
    # Gao et al. 2025 (Qwen): a soft gate against the policy that acted.
    "sapo": _row(_GRPO, surrogate=Surrogate.GATED, proximal=Proximal.BEHAVIOUR),
    # Zheng et al. 2025: for stale trajectories; the clip's bounds are far, the second moment does the work.
    "m2po": _row(_GRPO, second_moment=0.04, importance_cap=10.0),
    # Schulman et al. 2017, with the estimate of Schulman et al. 2016: a critic says what each token was worth.
    "ppo": _row(_GRPO, baseline=Baseline.CRITIC, scale=Scale.BATCH_STD, mini_batches=2, value_clip=0.2),
    # Agarwal et al. 2024 (GKD, on-policy with the reverse divergence): what the policy said itself, judged token by
    # token by a teacher. Rewards teach nothing.
    "distillation": _row(
        _GRPO, baseline=Baseline.NONE, scale=Scale.NONE, rl_coefficient=0.0, distill_coefficient=1.0
    ),
}

_PARTS: TypeAdapter[Algorithm] = TypeAdapter(Algorithm)
_OF_REWARDS = (
    "surrogate",
    "baseline",
    "scale",
    "clip_low",
    "clip_high",
    "dual_clip",
    "gate_positive",
    "gate_negative",
    "kl_coefficient",
    "kl_form",
    "turn_discount",
    "gae_lambda",
    "discount",
    "value_clip",
    "critic_rate",
    "critic_warmup",
    "running_mean_decay",
    "overlong_factor",
    "overlong_tokens",
    "overlong_tail",
    "reward",
)
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
    _refuse_unused(settings, dataclasses.replace(preset, **parts))
    return _checked(dataclasses.replace(preset, **parts))


def check_teacher(settings: TeacherSettings, algorithm: Algorithm) -> None:
    """Raises ConfigurationError for a teacher that nothing is learnt from, or one that is missing."""
    if algorithm.has_teacher and settings.url is None:
        raise ConfigurationError(
            "trainer.teacher.url: distill_coefficient is above 0, and no teacher is named; write the address of the"
            ' engine that serves it:\n[trainer.teacher]\nurl = "http://127.0.0.1:30000"'
        )
    if settings.url is not None and not algorithm.has_teacher:
        raise ConfigurationError(
            "trainer.teacher.url: nothing is learnt from it while distill_coefficient is 0; to learn from it alone"
            ' set trainer.algorithm.preset = "distillation", to learn from rewards too set distill_coefficient'
        )


def _checked(algorithm: Algorithm) -> Algorithm:
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
    if algorithm.second_moment is not None and algorithm.proximal is Proximal.BEHAVIOUR:
        raise ConfigurationError(
            "trainer.algorithm.second_moment: it bounds the distance of the proximal from the behaviour policy, which"
            " are the same with proximal = behaviour; choose recompute or loglinear"
        )
    if algorithm.has_critic and algorithm.drop_degenerate:
        raise ConfigurationError(
            "trainer.algorithm.drop_degenerate: with a critic no trajectory is without advantages; set it to false"
        )
    if not algorithm.learns_from_rewards and not algorithm.has_teacher:
        raise ConfigurationError(
            "trainer.algorithm.distill_coefficient: with rl_coefficient at 0 too nothing would be learnt; set one"
        )
    if not algorithm.learns_from_rewards and (algorithm.has_critic or algorithm.has_reference):
        model = "critic" if algorithm.has_critic else "reference model"
        raise ConfigurationError(
            f"trainer.algorithm.rl_coefficient: at 0 nothing is learnt with the {model} that this would have; to"
            ' learn from a teacher alone choose preset = "distillation"'
        )
    if algorithm.overlong_tail >= algorithm.overlong_tokens:
        raise ConfigurationError(
            f"trainer.algorithm.overlong_tail: {algorithm.overlong_tail} must be below overlong_tokens"
            f" ({algorithm.overlong_tokens})"
        )
    return algorithm


def _refuse_unused(settings: AlgorithmSettings, algorithm: Algorithm) -> None:
    """A part that is given and changes nothing is a mistake of who gave it."""
    clips = (Surrogate.CLIP, Surrogate.SEQUENCE_CLIP)
    uses = {
        "dual_clip": (algorithm.surrogate in clips, f"surrogate {algorithm.surrogate.value} does not clip so"),
        "clip_low": (algorithm.surrogate is not Surrogate.GATED, "the gated surrogate clips nothing"),
        "clip_high": (algorithm.surrogate is not Surrogate.GATED, "the gated surrogate clips nothing"),
        "gate_positive": (algorithm.surrogate is Surrogate.GATED, "only the gated surrogate has a gate"),
        "gate_negative": (algorithm.surrogate is Surrogate.GATED, "only the gated surrogate has a gate"),
        "constant_tokens": (
            algorithm.denominator is Denominator.CONSTANT,
            f"the denominator {algorithm.denominator.value} does not use it",
        ),
        "importance_cap": (
            algorithm.has_teacher or algorithm.proximal is not Proximal.BEHAVIOUR,
            "with proximal = behaviour there is no weight to cap",
        ),
    }
    uses["rl_coefficient"] = (algorithm.has_teacher, "there is no teacher while distill_coefficient is 0")
    uses["kl_form"] = (algorithm.has_reference, "there is no reference while kl_coefficient is 0")
    for name in ("gae_lambda", "discount", "value_clip", "critic_rate", "critic_warmup"):
        uses[name] = (algorithm.has_critic, f"baseline {algorithm.baseline.value} has no critic")
    if algorithm.has_critic:
        uses["running_mean_decay"] = (False, "baseline critic compares nothing with a running mean")
        uses["value_clip"] = (
            algorithm.mini_batches > 1,
            "in the first optimiser step of a batch values are those at its start; it needs mini_batches",
        )
    for name in ("overlong_tokens", "overlong_tail"):
        uses[name] = (algorithm.overlong_factor > 0, "nothing is penalised while overlong_factor is 0")
    if algorithm.has_teacher and algorithm.drop_degenerate:
        uses["drop_degenerate"] = (False, "a teacher has something to say of every trajectory")
    if not algorithm.learns_from_rewards:
        uses |= dict.fromkeys(_OF_REWARDS, (False, "rewards teach nothing while rl_coefficient is 0"))
        uses["proximal"] = (algorithm.second_moment is not None, "a teacher is listened to without it")
    for name, (used, reason) in uses.items():
        if not used and getattr(settings, name) != AlgorithmSettings.model_fields[name].default:
            raise ConfigurationError(f"trainer.algorithm.{name}: {reason}")
