"""Refuse, at start, parts of an algorithm that contradict each other and settings that would have no effect."""

from __future__ import annotations

import dataclasses

from trainer.algorithm.parts import Algorithm
from trainer.config import (
    AlgorithmSettings,
    Baseline,
    Correction,
    Denominator,
    Proximal,
    ReferenceSettings,
    Scale,
    Surrogate,
    TeacherSettings,
    Truncated,
    is_cleared,
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
    "task_by",
    "overlong_factor",
    "overlong_tokens",
    "overlong_tail",
    "reward",
)
_CLIP = ("clip_low", "clip_high")
_GATE = ("gate_positive", "gate_negative")
_CRITIC = ("gae_lambda", "discount", "value_clip", "critic_rate", "critic_warmup")
_RUNNING = ("running_mean_decay", "task_by")
_COMPARISON = ("baseline", "scale", "turn_discount", *_RUNNING)
_OVERLONG = ("overlong_tokens", "overlong_tail")
_HINDSIGHT = ("hindsight_clip", "hindsight_floor")
_WEIGHT = ("importance_cap", "correction", "correction_low", "correction_high", "veto")
_MASKS = (Correction.MASK, Correction.SEQUENCE_MASK, Correction.GEOMETRIC_MASK)
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
    if algorithm.whitens and algorithm.has_critic:
        raise ConfigurationError(
            "trainer.algorithm.scale: token_std is for advantages without a critic; with a critic choose batch_std,"
            " which is over tokens too"
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
    if algorithm.learns_from_words and (algorithm.has_teacher or algorithm.has_critic):
        other = "distill_coefficient" if algorithm.has_teacher else "baseline = critic"
        why = (
            "scores tokens at temperature 1, which hindsight does not"
            if algorithm.has_teacher
            else "makes the advantages of its own values, to which hindsight adds nothing"
        )
        raise ConfigurationError(
            f"trainer.algorithm.hindsight_coefficient: it cannot be used beside {other}, which {why}; set one of the"
            " two to none"
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
    for name, reason in unused_parts(algorithm).items():
        given = getattr(settings, name)
        if given != AlgorithmSettings.model_fields[name].default and not is_cleared(given):
            raise ConfigurationError(f"trainer.algorithm.{name}: {reason}")


def dead_parts(preset: Algorithm, algorithm: Algorithm) -> dict[str, str]:
    """Return the parts of a preset that have an effect there but none in `algorithm`, with reasons by name.

    `algorithm` is the preset with the user's changes. Parts without a value are omitted, and so are those that the
    user replaced by a function or by learning from a teacher alone.
    """
    if preset.learns_from_rewards and not algorithm.learns_from_rewards:
        return {}
    before = unused_parts(dataclasses.replace(preset, loss=algorithm.loss, advantage=algorithm.advantage))
    return {
        name: reason
        for name, reason in unused_parts(algorithm).items()
        if name not in before and getattr(algorithm, name) is not None
    }


def unused_parts(algorithm: Algorithm) -> dict[str, str]:
    """Return the parts that have no effect in combination with the others, with reasons by name."""
    unused = {
        **_unused_in_the_ratio(algorithm),
        **_unused_in_the_weight(algorithm),
        **_unused_beside_a_critic(algorithm),
    }
    if algorithm.denominator is not Denominator.CONSTANT:
        unused["constant_tokens"] = f"the denominator {algorithm.denominator.value} does not use it"
    if not algorithm.has_teacher:
        unused["rl_coefficient"] = "there is no teacher while distill_coefficient is 0"
    if not algorithm.learns_from_words:
        unused |= dict.fromkeys(_HINDSIGHT, "texts teach nothing while hindsight_coefficient is 0")
    if not algorithm.has_divergence:
        unused["kl_form"] = "there is no reference while kl_coefficient is 0"
    if not algorithm.overlong_factor:
        unused |= dict.fromkeys(_OVERLONG, "nothing is penalised while overlong_factor is 0")
    if algorithm.drop_degenerate and algorithm.has_teacher:
        unused["drop_degenerate"] = "a teacher has something to say of every trajectory"
    elif algorithm.drop_degenerate and algorithm.whitens:
        unused["drop_degenerate"] = "scale = token_std leaves no trajectory without an advantage"
    if algorithm.advantage is not None:
        unused |= dict.fromkeys(_COMPARISON, "advantage is a function of your own, and what it returns is final")
    if algorithm.fill and algorithm.has_teacher:
        unused["fill"] = "a teacher has something to say of every trajectory"
    if not algorithm.learns_from_rewards:
        unused |= dict.fromkeys(_OF_REWARDS, "rewards teach nothing while rl_coefficient is 0")
        if algorithm.second_moment is None:
            unused["proximal"] = "a teacher is listened to without it"
    return unused


def _unused_in_the_ratio(algorithm: Algorithm) -> dict[str, str]:
    if algorithm.loss is not None:
        because = "loss is a function of your own, in place of the surrogate"
        return dict.fromkeys(("surrogate", *_CLIP, "dual_clip", *_GATE), because)
    surrogate, unused = algorithm.surrogate, dict[str, str]()
    if surrogate is Surrogate.GATED:
        unused |= dict.fromkeys(_CLIP, "the gated surrogate clips nothing")
    elif surrogate is Surrogate.RATIO:
        unused |= dict.fromkeys(_CLIP, "surrogate ratio clips nothing")
    if surrogate not in (Surrogate.CLIP, Surrogate.SEQUENCE_CLIP):
        unused["dual_clip"] = f"surrogate {surrogate.value} does not clip so"
    if surrogate is not Surrogate.GATED:
        unused |= dict.fromkeys(_GATE, "only the gated surrogate has a gate")
    if algorithm.ratio_is_one:
        because = (
            "with one mini-batch and proximal = recompute every ratio is exactly 1, so that it cannot act; set"
            " mini_batches to 2 or more"
        )
        acting = ("surrogate", *_CLIP, "dual_clip", *_GATE) if surrogate is not Surrogate.RATIO else ()
        unused = {**dict.fromkeys(acting, because), **unused}
    return unused


def _unused_beside_a_critic(algorithm: Algorithm) -> dict[str, str]:
    if not algorithm.has_critic:
        return dict.fromkeys(_CRITIC, f"baseline {algorithm.baseline.value} has no critic")
    unused = dict.fromkeys(_RUNNING, "baseline critic compares nothing with a running mean")
    if algorithm.mini_batches == 1:
        unused["value_clip"] = (
            "in the first optimiser step of a batch values are those at its start; set mini_batches to 2 or more"
        )
    return unused


def check_reference(settings: ReferenceSettings, algorithm: Algorithm) -> None:
    """Raise ConfigurationError if a reference is to move and the algorithm has none."""
    if settings.follows and not algorithm.has_reference:
        option = "reset_every" if settings.reset_every is not None else "ema"
        raise ConfigurationError(
            f"trainer.reference.{option}: there is no reference while kl_coefficient and hindsight_coefficient are"
            " 0; set one of them in [trainer.algorithm], or leave it out"
        )


def _unused_in_the_weight(algorithm: Algorithm) -> dict[str, str]:
    corrects = (
        algorithm.proximal is not Proximal.BEHAVIOUR
        or algorithm.has_teacher
        or (algorithm.has_divergence and not algorithm.pays_divergence_in_reward)
    )
    correction = algorithm.correction
    if not corrects:
        because = "with proximal = behaviour the ratio is against the policy that acted, and there is no weight"
        return dict.fromkeys(_WEIGHT, because)
    if correction is Correction.NONE:
        return dict.fromkeys(("correction_low", "correction_high"), "correction none has no bounds")
    if correction not in _MASKS:
        return {"correction_high": f"correction {correction.value} is bounded by importance_cap"}
    return {}


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
