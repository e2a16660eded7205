"""Combine every part with every preset: it changes the gradient of a batch, or it is refused by name."""

from __future__ import annotations

import dataclasses
from functools import cache
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
import torch
from torch import Tensor, nn

from proxy.contract.claim import ClaimedBatch
from proxy.contract.identifiers import ClaimId
from proxy.contract.trajectory import TrajectoryGroup
from proxy.contract.turn import FinishReason
from trainer.algorithm.parts import Algorithm
from trainer.algorithm.presets import PRESETS, resolve
from trainer.algorithm.running import RunningMeans
from trainer.batching.preparation import prepare
from trainer.config import (
    AlgorithmSettings,
    Baseline,
    BatchSettings,
    Denominator,
    Divergence,
    OptimizerSettings,
    Packing,
    Proximal,
    Scale,
    Surrogate,
    TaskBy,
    Truncated,
)
from trainer.distances import (
    HEAD,
    VOCABULARY,
    Tables,
    TableScorer,
    TableValues,
    common_batch,
    gradient,
    tables,
    taught_by_table,
)
from trainer.errors import ConfigurationError
from trainer.models.passes import Passes
from trainer.models.policy import Policy
from trainer.parallel.mesh import Ranks
from trainer.update import Learner

ALONE = Ranks(0, 1, torch.device("cpu"), None)
VISIBLE = 1e-9
"""Changes below this share of a gradient are rounding."""

FUNCTIONS = """
def loss(inputs):
    return -inputs.advantages_N * inputs.logprobs_N * (1 + inputs.entropy_N)

def advantage(sessions):
    return [[0.3 * len(session.turns) - 0.1 * place for place in range(len(session.turns))] for session in sessions]

def keep(sessions):
    return [len(session.turns) < 3 for session in sessions]
"""

OVERRIDES: dict[str, tuple[Any, ...]] = {
    "surrogate": tuple(Surrogate),
    "baseline": tuple(Baseline),
    "scale": tuple(Scale),
    "clip_low": (0.01, 0.5),
    "clip_high": (0.02, 1.5),
    "dual_clip": (1.01, 1.3, "none"),
    "gate_positive": (3.0,),
    "gate_negative": (3.0,),
    "importance_cap": (1.01,),
    "proximal": tuple(Proximal),
    "second_moment": (0.001, "none"),
    "denominator": tuple(Denominator),
    "constant_tokens": (7,),
    "drop_degenerate": (True, False),
    "fill": (True, False),
    "mini_batches": (1, 2, 3),
    "kl_coefficient": (0.0, 0.3),
    "kl_form": tuple(Divergence),
    "entropy_coefficient": (0.1,),
    "top_entropy_share": (0.3,),
    "rl_coefficient": (0.0, 0.5),
    "distill_coefficient": (0.0, 0.5),
    "turn_discount": (0.5,),
    "gae_lambda": (0.5,),
    "discount": (0.9,),
    "value_clip": (0.001, "none"),
    "critic_rate": (3.0,),
    "critic_warmup": (1,),
    "running_mean_decay": (0.5,),
    "task_by": tuple(TaskBy),
    "overlong_factor": (0.0, 0.7),
    "overlong_tokens": (12,),
    "overlong_tail": (3,),
    "truncated": tuple(Truncated),
    "reward": ({"high": 0.45},),
    "filters": ({"gibberish_logprob": -1.5, "gibberish_window": 1},),
    "loss": ("mine.py:loss",),
    "advantage": ("mine.py:advantage",),
    "filter": ("mine.py:keep",),
}


ELSEWHERE = {
    "router_aux_coefficient",  # tested with mixtures of experts in tests/trainer/models/archon
    "correction",
    "correction_low",
    "correction_high",
    "veto",
    "truncated_sampling",
    "hindsight_coefficient",  # tested with texts in tests/trainer/test_hindsight.py
    "hindsight_clip",
    "hindsight_floor",
}
"""Parts whose own tests show their effect."""


class _Policy(Passes, nn.Module):
    """A table of logits by the previous token, whose weights move from step to step; entropies carry a gradient."""

    packings = frozenset(Packing)
    vocabulary = VOCABULARY

    def __init__(self, start: Tensor) -> None:
        super().__init__()
        self.logits = nn.Parameter(start.clone())

    def forward(self, ids_BT: Tensor, _: Tensor, predictor_N: Tensor, targets_N: Tensor, *rest: Any) -> Any:
        logprobs_NV = (self.logits[ids_BT.flatten()[predictor_N]] / rest[0][:, None]).log_softmax(-1)
        return logprobs_NV.gather(-1, targets_N[:, None])[:, 0], -(logprobs_NV.exp() * logprobs_NV).sum(-1)

    def named_weights(self) -> Any:
        yield "logits", self.logits


@cache
def known_tables() -> Tables:
    """Return the tables of the common batch, with a policy further from those that sampled: ratios exceed wide bounds
    too."""
    known = tables()
    first = known.acting[0]
    start, moved = (first + 3 * (each - first) for each in (known.start, known.moved))
    return dataclasses.replace(known, start=start, moved=moved)


@cache
def batches() -> list[tuple[TrajectoryGroup, ...]]:
    """Return the batch used to compare presets, with cut answers, and with tasks by name and by first message; the
    same with other rewards; one session alone; and the first again, to test estimates remembered from earlier
    batches."""
    first = []
    common = common_batch(known_tables())
    for group in common:
        members = [
            msgspec.structs.replace(
                member,
                task=None if group is common[-1] else str(group.id),
                first_message=str(group.id).encode(),
                turns=tuple(
                    msgspec.structs.replace(
                        turn,
                        finish_reason=FinishReason.LENGTH if len(turn.output_ids) in (4, 9) else FinishReason.STOP,
                    )
                    for turn in member.turns
                ),
            )
            for member in group.trajectories
        ]
        first.append(msgspec.structs.replace(group, trajectories=tuple(members)))
    second = [
        msgspec.structs.replace(
            group,
            trajectories=tuple(
                msgspec.structs.replace(member, reward=1 - 0.7 * (member.reward or 0.0))
                for member in group.trajectories
            ),
        )
        for group in first
    ]
    return [tuple(first), tuple(second), tuple(first[-1:]), tuple(first)]


def effect(algorithm: Algorithm) -> list[Tensor]:
    """Return what a part changes: the gradient at weights moved by earlier steps, and over several batches the
    gradient of every optimiser step, the number of trained trajectories, and the critic's weights."""
    algorithm = dataclasses.replace(
        algorithm, overlong_tokens=algorithm.overlong_tokens or 16, overlong_tail=algorithm.overlong_tail or 8
    )
    known, settings = known_tables(), BatchSettings(packing=Packing.PADDED)
    policy, means = _Policy(known.start), RunningMeans.fresh(algorithm.running_mean_decay)
    critic: Any = TableValues(known.values) if algorithm.has_critic else None
    reference = TableScorer(known.base) if algorithm.has_reference else None
    # Steps so large that within a batch ratios exceed the clips, and values their range.
    optimizer = OptimizerSettings(clip_norm=1e9, learning_rate=0.3)
    learner = Learner(cast("Policy", policy), algorithm, optimizer, ALONE, reference, critic)
    found = [gradient(algorithm, known, common_batch(known))]
    learner.optimizer.register_step_pre_hook(lambda *_: found.append(_gradient(policy)))
    for number, groups in enumerate(batches()):
        claimed = ClaimedBatch(
            claim_id=ClaimId(str(number)), lease_expires_at=0.0, base_version=HEAD, groups=tuple(groups)
        )
        prepared = prepare(claimed, HEAD, settings, algorithm, means, VOCABULARY)
        means = prepared.advantages.means
        found.append(torch.tensor(float(len(prepared.batch.trajectories))))
        if not prepared.batch.trajectories or (prepared.advantages.all_zero and not algorithm.has_teacher):
            continue  # as the loop skips it
        taught = taught_by_table(prepared.batch.trajectories, known) if algorithm.has_teacher else None
        learner.update(prepared.packed(settings, algorithm), taught)
    return [*found, *([critic.values.detach()] if critic is not None else [])]


def _gradient(policy: _Policy) -> Tensor:
    assert policy.logits.grad is not None
    return policy.logits.grad.clone()


NOTHING_TO_LEAVE_OUT = {("reinforce_pp", "fill")}
"""Compared with the batch's mean, every group of this batch has a signal, so `fill` leaves none out."""


@cache
def effect_of_preset(preset: str) -> list[Tensor]:
    return effect(PRESETS[preset])


def differs(found: list[Tensor], wanted: list[Tensor]) -> bool:
    if len(found) != len(wanted):
        return True
    return any(bool((one - other).norm() > VISIBLE * other.norm()) for one, other in zip(found, wanted, strict=True))


@pytest.mark.parametrize("part", list(OVERRIDES))
@pytest.mark.parametrize("preset", list(PRESETS))
def test_a_part_changes_what_is_learnt_or_is_refused_by_name(
    preset: str, part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For every choice of a part, and for at least one value of a number."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(FUNCTIONS)
    if (preset, part) in NOTHING_TO_LEAVE_OUT:
        pytest.skip("every group of the batch has a signal")
    accepted = []
    for value in OVERRIDES[part]:
        own = getattr(PRESETS[preset], part)
        if value == own or (value == "none" and own is None):
            continue
        try:
            algorithm = resolve(AlgorithmSettings.model_validate({"preset": preset, part: value}))
        except ConfigurationError as error:
            said = str(error)
            assert said.startswith("trainer.algorithm."), said
            assert part in said or str(value) in said, said
            continue
        accepted.append((value, differs(effect(algorithm), effect_of_preset(preset))))
    acts = [is_different for _, is_different in accepted]
    numeric = any(isinstance(value, float) for value, _ in accepted)
    assert not accepted or (any(acts) if numeric else all(acts)), f"changes nothing: {accepted}"


def test_the_matrix_has_every_part() -> None:
    assert set(AlgorithmSettings.model_fields) <= {"preset", *OVERRIDES, *ELSEWHERE}
