from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from trainer.algorithm.parts import Algorithm, as_json, from_json
from trainer.algorithm.presets import PRESETS, resolve, warnings
from trainer.config import AlgorithmSettings, Baseline, Correction, Scale, Surrogate, Truncated, TruncatedSampling
from trainer.errors import ConfigurationError


@pytest.mark.parametrize("preset", list(PRESETS))
def test_a_preset_is_what_it_says_and_survives_being_written_down(preset: str) -> None:
    algorithm = resolve(AlgorithmSettings(preset=preset))
    assert algorithm == PRESETS[preset]
    assert from_json(as_json(algorithm)) == algorithm


def test_an_algorithm_of_an_older_trainer_is_what_it_was() -> None:
    """The configuration dates from before there were other surrogates and references."""
    names = (
        "baseline",
        "scale",
        "clip_low",
        "clip_high",
        "dual_clip",
        "importance_cap",
        "proximal",
        "denominator",
        "turn_discount",
        "running_mean_decay",
        "reward",
    )
    written = as_json(PRESETS["grpo"])
    # Cut answers and answers from a cut distribution were trained like others; a batch was one step; the importance
    # weight did not depend on the advantage.
    before = dataclasses.replace(
        PRESETS["grpo"],
        mini_batches=1,
        truncated=Truncated.TRAIN,
        truncated_sampling=TruncatedSampling.TRAIN,
        correction=Correction.TRUNCATE,
    )
    assert from_json({name: written[name] for name in names}) == before


def test_a_part_that_is_not_known_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="parts of an algorithm"):
        from_json({**as_json(PRESETS["grpo"]), "surrogate": "magic"})


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"preset": "gpro"}, "is not one of: grpo, dapo"),
        ({"preset": "sapo", "clip_low": 0.1}, "clip_low: the gated surrogate clips nothing"),
        ({"preset": "sapo", "importance_cap": 3.0}, "importance_cap: with proximal = behaviour"),
        ({"preset": "sapo", "correction": "mask"}, "correction: with proximal = behaviour"),
        ({"preset": "cispo", "veto": 1e-4}, "veto: with proximal = behaviour"),
        ({"correction_high": 3.0}, "correction_high: correction signed_truncate is bounded by importance_cap"),
        ({"correction": "none", "correction_low": 0.5}, "correction_low: correction none has no bounds"),
        ({"preset": "cispo", "dual_clip": 3.0}, "dual_clip: surrogate truncated does not clip so"),
        ({"gate_positive": 2.0}, "gate_positive: only the gated surrogate"),
        ({"constant_tokens": 9}, "constant_tokens: the denominator tokens does not use it"),
        ({"kl_form": "k1"}, "kl_form: there is no reference while kl_coefficient is 0"),
        ({"overlong_tail": 9}, "overlong_tail: nothing is penalised"),
        (
            {"preset": "dapo", "overlong_tokens": 100, "overlong_tail": 100},
            "overlong_tail: 100 must be below overlong_tokens",
        ),
        (
            {"preset": "dapo", "baseline": "critic", "scale": "none", "drop_degenerate": False},
            "fill: with a critic no group is without signal",
        ),
        ({"preset": "distillation", "fill": True}, "fill: a teacher has something to say"),
        ({"mini_batches": 1, "clip_low": 0.1}, "clip_low: with one mini-batch and proximal"),
        ({"mini_batches": 1, "dual_clip": 3.0}, "dual_clip: with one mini-batch and proximal"),
        ({"mini_batches": 1, "surrogate": "sequence_clip"}, "surrogate: with one mini-batch"),
        ({"preset": "cispo", "mini_batches": 1, "proximal": "recompute", "clip_high": 1.0}, "clip_high: with one"),
        ({"preset": "rloo", "clip_high": 0.3}, "clip_high: surrogate ratio clips nothing"),
        ({"preset": "m2po", "dual_clip": 3.0}, "dual_clip: surrogate ratio does not clip so"),
        ({"preset": "reinforce_pp", "drop_degenerate": True}, "drop_degenerate: scale = token_std leaves no"),
        ({"preset": "ppo", "scale": "token_std"}, "scale: token_std is for advantages without a critic"),
        ({"scale": "group_std", "baseline": "none"}, "scale: group_std divides by the spread"),
        ({"dual_clip": 1.1}, "dual_clip: 1.1 must be above"),
        ({"gae_lambda": 0.9}, "gae_lambda: baseline group_mean has no critic"),
        ({"preset": "rloo", "critic_warmup": 9}, "critic_warmup: baseline leave_one_out has no critic"),
        ({"preset": "ppo", "mini_batches": 1, "value_clip": 0.1}, "value_clip: in the first optimiser step"),
        ({"preset": "ppo", "running_mean_decay": 0.5}, "running_mean_decay: baseline critic compares nothing"),
        ({"baseline": "critic"}, "scale: group_std divides by the spread"),
        ({"preset": "dapo", "baseline": "critic", "scale": "none"}, "drop_degenerate: with a critic no trajectory"),
        ({"preset": "distillation", "kl_coefficient": 0.1}, "kl_coefficient: rewards teach nothing"),
        ({"preset": "distillation", "reward": {"scale": 2.0}}, "reward: rewards teach nothing"),
        ({"preset": "distillation", "proximal": "loglinear"}, "proximal: a teacher is listened to without it"),
        ({"preset": "distillation", "drop_degenerate": True}, "drop_degenerate: a teacher has something to say"),
        ({"preset": "distillation", "distill_coefficient": 0.0}, "distill_coefficient: with rl_coefficient at 0 too"),
        ({"preset": "ppo", "rl_coefficient": 0, "distill_coefficient": 1}, "with the critic that"),
        ({"preset": "reinforce_pp", "rl_coefficient": 0, "distill_coefficient": 1}, "with the reference model that"),
        ({"preset": "distillation", "truncated": "zero_reward"}, "truncated: zero_reward changes nothing"),
        ({"rl_coefficient": 0.5}, "rl_coefficient: there is no teacher"),
        ({"preset": "distillation", "entropy_coefficient": 0.1}, "entropy_coefficient: rewards teach nothing"),
        ({"preset": "distillation", "top_entropy_share": 0.2}, "top_entropy_share: rewards teach nothing"),
    ],
)
def test_parts_that_contradict_each_other_or_change_nothing_are_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        resolve(AlgorithmSettings(**given))


def test_a_teacher_stands_alone_or_beside_rewards() -> None:
    alone = resolve(AlgorithmSettings(preset="distillation", importance_cap=4.0, mini_batches=2))
    assert (alone.has_teacher, alone.learns_from_rewards, alone.importance_cap) == (True, False, 4.0)
    beside = resolve(AlgorithmSettings(preset="sapo", distill_coefficient=0.1, importance_cap=4.0))
    assert (beside.has_teacher, beside.learns_from_rewards) == (True, True)
    assert [name for name, each in PRESETS.items() if each.has_teacher] == ["distillation"]


def test_a_divergence_in_the_loss_is_corrected_where_the_ratio_is_not() -> None:
    beside = {"preset": "sapo", "kl_coefficient": 0.1, "correction": "mask", "correction_high": 3.0}
    assert resolve(AlgorithmSettings.model_validate(beside)).objective.bounds.high == 3.0
    with pytest.raises(ConfigurationError, match="correction: with proximal = behaviour"):
        resolve(AlgorithmSettings.model_validate({**beside, "kl_form": "k1"}))


def test_parts_may_be_combined() -> None:
    algorithm = resolve(
        AlgorithmSettings(preset="gspo", surrogate=Surrogate.GATED, gate_positive=2.0, kl_coefficient=0.1)
    )
    assert isinstance(algorithm, Algorithm)
    assert (algorithm.gate_positive, algorithm.has_reference) == (2.0, True)


@pytest.mark.parametrize("preset", list(PRESETS))
def test_at_its_defaults_every_part_of_a_preset_can_act(preset: str) -> None:
    """The ratio may differ from 1 wherever the preset's term depends on it."""
    assert warnings(AlgorithmSettings(preset=preset)) == []
    algorithm = PRESETS[preset]
    assert not algorithm.ratio_is_one or algorithm.surrogate is Surrogate.RATIO or not algorithm.learns_from_rewards


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"mini_batches": 1}, ["surrogate, clip_low, clip_high of preset grpo: with one mini-batch"]),
        (
            {"preset": "gspo", "mini_batches": 1},
            ["surrogate, clip_low, clip_high of preset gspo: with"],
        ),
        (
            {"preset": "sapo", "mini_batches": 1, "proximal": "recompute"},
            ["surrogate, gate_positive, gate_negative of preset sapo: with one mini-batch"],
        ),
        (
            {"preset": "ppo", "mini_batches": 1},
            ["surrogate, clip_low, clip_high of preset ppo", "value_clip of preset ppo: in the first optimiser step"],
        ),
        ({"preset": "ppo", "value_clip": "none"}, []),
        ({"preset": "cispo", "mini_batches": 1}, []),  # it acts on stale tokens
        ({"proximal": "behaviour"}, ["importance_cap, correction of preset grpo: with proximal = behaviour"]),
        ({"rl_coefficient": 0.0, "distill_coefficient": 1.0}, []),
    ],
)
def test_a_preset_whose_own_part_cannot_act_is_warned_of(given: dict[str, Any], said: list[str]) -> None:
    found = warnings(AlgorithmSettings(**given))
    assert len(found) == len(said)
    assert all(line.startswith(start) for line, start in zip(found, said, strict=True))


def test_a_part_can_be_cleared() -> None:
    """The text "none" clears a part; for other options "none" is a choice."""
    parts = {
        "ppo": resolve(AlgorithmSettings.model_validate({"preset": "ppo", "value_clip": "none"})),
        "m2po": resolve(AlgorithmSettings.model_validate({"preset": "m2po", "second_moment": "none"})),
        "grpo": resolve(AlgorithmSettings.model_validate({"dual_clip": "none", "baseline": "none", "scale": "none"})),
    }
    assert (parts["ppo"].value_clip, parts["m2po"].second_moment, parts["grpo"].dual_clip) == (None, None, None)
    assert (parts["grpo"].baseline, parts["grpo"].scale) == (Baseline.NONE, Scale.NONE)
