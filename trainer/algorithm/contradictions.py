"""Refusals at start: parts of an algorithm that contradict each other, and given parts that would change nothing."""

from __future__ import annotations

from trainer.algorithm.parts import Algorithm
from trainer.config import (
    AlgorithmSettings,
    Baseline,
    Denominator,
    Proximal,
    ReferenceSettings,
    Scale,
    Surrogate,
    TeacherSettings,
    Truncated,
)
from trainer.errors import ConfigurationError

_OF_REWARDS = (
    "loss",
    "advantage",
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
    "entropy_coefficient",
    "top_entropy_share",
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


def refuse_contradictions(algorithm: Algorithm) -> None:
    """Raise ConfigurationError if two parts of the algorithm cannot be used together."""
    if algorithm.scale is Scale.GROUP_STD and algorithm.baseline not in _GROUP_BASELINES:
        raise ConfigurationError(
            f"trainer.algorithm.scale: group_std divides by the spread around a group's own mean, which baseline"
            f" {algorithm.baseline.value} does not use; choose batch_std or none, or a group baseline"
        )
    if algorithm.scale is Scale.RUNNING_STD and algorithm.baseline in (Baseline.CRITIC, Baseline.NONE):
        raise ConfigurationError(
            f"trainer.algorithm.scale: running_std divides by the spread around a mean, which baseline"
            f" {algorithm.baseline.value} does not use; choose batch_std or none, or baseline running_mean"
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
    if algorithm.has_critic and algorithm.fill:
        raise ConfigurationError(
            "trainer.algorithm.fill: with a critic no group is without signal, so that none would be left out; set it"
            " to false"
        )
    if algorithm.advantage is not None and algorithm.has_critic:
        raise ConfigurationError(
            "trainer.algorithm.advantage: with baseline = critic the critic makes the advantages; choose another"
            " baseline or preset, or leave the function out"
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
    if not algorithm.learns_from_rewards and algorithm.truncated is Truncated.ZERO_REWARD:
        raise ConfigurationError(
            "trainer.algorithm.truncated: zero_reward changes nothing, as rewards teach nothing while rl_coefficient"
            " is 0; choose train or mask"
        )
    tokens, tail = algorithm.overlong_tokens, algorithm.overlong_tail
    if tokens is not None and tail is not None and tail >= tokens:
        raise ConfigurationError(
            f"trainer.algorithm.overlong_tail: {tail} must be below overlong_tokens ({tokens}); leave it out for a"
            " fifth of it"
        )


def refuse_unused(settings: AlgorithmSettings, algorithm: Algorithm) -> None:
    """Raise ConfigurationError if the settings give a part that `algorithm`, which they resolve to, does not use."""
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
    if algorithm.loss is not None:
        for name in ("surrogate", "clip_low", "clip_high", "dual_clip", "gate_positive", "gate_negative"):
            uses[name] = (False, "loss is a function of your own, in place of the surrogate")
    if algorithm.advantage is not None:
        for name in ("baseline", "scale", "turn_discount", "running_mean_decay"):
            uses[name] = (False, "advantage is a function of your own, and what it returns is final")
    for name in ("overlong_tokens", "overlong_tail"):
        uses[name] = (algorithm.overlong_factor > 0, "nothing is penalised while overlong_factor is 0")
    if algorithm.has_teacher and algorithm.drop_degenerate:
        uses["drop_degenerate"] = (False, "a teacher has something to say of every trajectory")
    if algorithm.has_teacher and algorithm.fill:
        uses["fill"] = (False, "a teacher has something to say of every trajectory")
    if not algorithm.learns_from_rewards:
        uses |= dict.fromkeys(_OF_REWARDS, (False, "rewards teach nothing while rl_coefficient is 0"))
        uses["proximal"] = (algorithm.second_moment is not None, "a teacher is listened to without it")
    for name, (used, reason) in uses.items():
        if not used and getattr(settings, name) != AlgorithmSettings.model_fields[name].default:
            raise ConfigurationError(f"trainer.algorithm.{name}: {reason}")


def check_reference(settings: ReferenceSettings, algorithm: Algorithm) -> None:
    """Raise ConfigurationError if a reference is to move and the algorithm has none."""
    if settings.follows and not algorithm.has_reference:
        option = "reset_every" if settings.reset_every is not None else "ema"
        raise ConfigurationError(
            f"trainer.reference.{option}: there is no reference while kl_coefficient is 0; set"
            " trainer.algorithm.kl_coefficient, or leave it out"
        )


def check_teacher(settings: TeacherSettings, algorithm: Algorithm) -> None:
    """Raise ConfigurationError if the algorithm needs a teacher and none is configured, or the other way round."""
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
