"""The distances between the gradients of all presets on one small, fixed batch.

The model is a table of logits in float64; preparation, advantages, packing and learner are those that train.

Axes: V vocabulary, N trained tokens.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from proxy.contract.arrays import pack_ids, pack_logprobs
from proxy.contract.claim import ClaimedBatch
from proxy.contract.identifiers import ClaimId, GroupId, SessionId, TurnId
from proxy.contract.trajectory import Trajectory, TrajectoryGroup, TrajectoryTurn
from proxy.contract.turn import LogprobConvention, VersionSpan
from trainer.algorithm.parts import Algorithm
from trainer.algorithm.presets import PRESETS
from trainer.algorithm.running import RunningMeans
from trainer.batching.preparation import prepare
from trainer.batching.teaching import Taught
from trainer.config import BatchSettings, OptimizerSettings, Packing
from trainer.models.passes import Passes, Rows, Scores
from trainer.models.value import ValueModel
from trainer.parallel.mesh import Ranks
from trainer.update import Learner

VOCABULARY = 12
HEAD = 2
"""The version that is trained; the batch has tokens of versions 0 to 2."""
LONGEST = 16
"""Number of tokens from which an answer is overlong in this batch."""
DRIFT = 0.35
"""Difference of a logit between two versions, and within a step: enough for ratios to leave the clips' ranges."""


@dataclass(frozen=True, kw_only=True)
class Tables:
    """Logits by token and next token, V×V: of each behaviour version, of the weights at the start of the step, of
    the weights after earlier steps of the batch, of the base model and of the teacher; and a critic's values by
    token."""

    acting: tuple[Tensor, ...]
    start: Tensor
    moved: Tensor
    base: Tensor
    teacher: Tensor
    values: Tensor


def tables() -> Tables:
    rng = random.Random(0)  # noqa: S311 - no secret; unlike torch's it draws the same on every processor

    def noise(*shape: int) -> Tensor:
        return torch.tensor([rng.gauss() for _ in range(math.prod(shape))], dtype=torch.float64).view(shape)

    square = (VOCABULARY, VOCABULARY)
    acting = [noise(*square)]
    for _ in range(HEAD):
        acting.append(acting[-1] + DRIFT * noise(*square))
    start = acting[-1]
    return Tables(
        acting=tuple(acting),
        start=start,
        moved=start + DRIFT * noise(*square),
        base=start + DRIFT * noise(*square),
        teacher=start + noise(*square),
        values=0.2 * noise(VOCABULARY),
    )


class TablePolicy(Passes, nn.Module):
    """A policy whose logits depend on the previous token alone.

    It is scored at the start of a step and learns at weights that earlier steps of the batch have moved. `gradient`
    is that of the last optimiser step.
    """

    packings = frozenset(Packing)
    vocabulary = VOCABULARY

    def __init__(self, start: Tensor, moved: Tensor) -> None:
        super().__init__()
        self.logits = nn.Parameter(moved.clone())
        self.gradient = torch.zeros_like(moved)
        self._start = start

    def forward(self, ids_BT: Tensor, _: Tensor, predictor_N: Tensor, targets_N: Tensor, *rest: Any) -> Any:
        return table_scores(self.logits, ids_BT.flatten()[predictor_N], targets_N, rest[0])

    def score(self, rows: Sequence[Rows]) -> list[Scores]:
        return scored(self._start, rows)

    def named_weights(self) -> Iterator[tuple[str, nn.Parameter]]:
        yield "logits", self.logits

    def gradient_norm(self) -> float:
        if self.logits.grad is not None:
            self.gradient = self.logits.grad.clone()
        return super().gradient_norm()

    def load_base(self, directory: Path) -> None:
        raise NotImplementedError("a table has no directory")

    load_version = load_base


class TableScorer:
    """A reference with a table of logits."""

    def __init__(self, logits: Tensor) -> None:
        self._logits = logits

    def score(self, rows: Sequence[Rows]) -> list[Scores]:
        return scored(self._logits, rows)


class TableValues(nn.Module):
    """A critic whose value depends on the previous token alone."""

    packings = frozenset(Packing)

    def __init__(self, values: Tensor) -> None:
        super().__init__()
        self.values = nn.Parameter(values.clone())

    def forward(self, ids_BT: Tensor, _: Tensor, predictor_N: Tensor, *__: Any) -> Tensor:
        return self.values[ids_BT.flatten()[predictor_N]]


def scored(logits: Tensor, rows: Sequence[Rows]) -> list[Scores]:
    with torch.no_grad():
        return [
            table_scores(logits, each.input_ids_BT.flatten()[each.predictor_N], each.targets_N, each.temperature_N)
            for each in rows
        ]


def table_scores(logits: Tensor, before_N: Tensor, targets_N: Tensor, temperature_N: Tensor) -> Scores:
    logprobs_NV = (logits[before_N] / temperature_N[:, None]).log_softmax(-1)
    entropies_N = -(logprobs_NV.detach().exp() * logprobs_NV.detach()).sum(-1)
    return Scores(logprobs_NV.gather(-1, targets_N[:, None])[:, 0], entropies_N)


def common_batch(known: Tables) -> tuple[TrajectoryGroup, ...]:
    """Return the batch: groups of four, groups of three with closer rewards, groups of two with equal rewards, and a
    single session; answers of one to fifteen tokens by three versions, sessions of one to three turns, one turn with
    a reward."""
    rng = random.Random(1)  # noqa: S311 - see `tables`
    plan: list[tuple[str | None, list[tuple[float, list[int]]]]] = [
        ("four", [(1.0, [3, 5]), (0.0, [9]), (0.25, [2, 1, 4]), (0.0, [15])]),
        ("three", [(0.4, [6, 2]), (0.6, [1]), (0.5, [7, 3])]),
        ("two", [(1.0, [4]), (1.0, [8, 2])]),
        (None, [(0.75, [5, 5])]),
    ]
    number = iter(range(100))
    groups = []
    for name, members in plan:
        trajectories = [
            _session(f"ses_{next(number)}", name, reward, lengths, known, rng) for reward, lengths in members
        ]
        groups.append(TrajectoryGroup(id=None if name is None else GroupId(name), trajectories=tuple(trajectories)))
    return tuple(groups)


def _session(
    name: str, group: str | None, reward: float, lengths: Sequence[int], known: Tables, rng: random.Random
) -> Trajectory:
    turns: list[TrajectoryTurn] = []
    past = 0
    for index, length in enumerate(lengths):
        version = rng.randrange(HEAD + 1)
        prompt = [rng.randrange(VOCABULARY) for _ in range(2)]
        output, logprobs = _draw(known.acting[version], prompt[-1], length, rng)
        turns.append(
            TrajectoryTurn(
                id=TurnId(f"turn_{name}_{index}"),
                parent=index - 1 if index else None,
                prefix_tokens=past,
                packed_prompt_ids=pack_ids(prompt),
                packed_output_ids=pack_ids(output),
                packed_logprobs=pack_logprobs(logprobs),
                spans=(VersionSpan(version=version, start=0, end=length),),
                temperature=1.0,
                convention=LogprobConvention.SAMPLED,
                trainable=True,
                reward=0.5 if len(lengths) == 3 and index == 1 else None,
            )
        )
        past += len(prompt) + length
    return Trajectory(
        session_id=SessionId(name),
        group_id=None if group is None else GroupId(group),
        task=None,
        turns=tuple(turns),
        reward=reward,
    )


def _draw(logits: Tensor, before: int, length: int, rng: random.Random) -> tuple[list[int], list[float]]:
    output, logprobs = [], []
    for _ in range(length):
        row = logits[before].log_softmax(-1).tolist()
        before = rng.choices(range(VOCABULARY), [math.exp(each) for each in row])[0]
        output.append(before)
        logprobs.append(row[before])
    return output, logprobs


def gradient(algorithm: Algorithm, known: Tables, groups: Sequence[TrajectoryGroup]) -> Tensor:
    """Return the gradient of an algorithm's loss over the whole batch, V×V; decision 0059 explains where it is
    taken."""
    alone, settings = Ranks(0, 1, torch.device("cpu"), None), BatchSettings(packing=Packing.PADDED)
    claimed = ClaimedBatch(claim_id=ClaimId("claim"), lease_expires_at=0.0, base_version=HEAD, groups=tuple(groups))
    means = RunningMeans.fresh(algorithm.running_mean_decay)
    prepared = prepare(claimed, HEAD, settings, algorithm, means, VOCABULARY)
    packed = prepared.packed(settings, dataclasses.replace(algorithm, mini_batches=1))
    policy = TablePolicy(known.start, known.moved if algorithm.mini_batches > 1 else known.start)
    learner = Learner(
        policy,
        algorithm,
        OptimizerSettings(clip_norm=1e9),
        alone,
        TableScorer(known.base) if algorithm.has_reference else None,
        cast("ValueModel", TableValues(known.values)) if algorithm.has_critic else None,
    )
    learner.update(packed, taught_by_table(prepared.batch.trajectories, known) if algorithm.has_teacher else None)
    return policy.gradient


def taught_by_table(trajectories: Sequence[Trajectory], known: Tables) -> Taught:
    logprobs = known.teacher.log_softmax(-1)
    return {
        (index, number): [
            float(logprobs[before, token])
            for before, token in zip((turn.prompt_ids[-1], *turn.output_ids), turn.output_ids, strict=False)
        ]
        for index, trajectory in enumerate(trajectories)
        for number, turn in enumerate(trajectory.turns)
    }


def gradients() -> dict[str, Tensor]:
    """Return the gradient of every preset on the batch, by name."""
    known = tables()
    groups = common_batch(known)
    return {name: gradient(as_for_the_batch(algorithm), known, groups) for name, algorithm in PRESETS.items()}


def as_for_the_batch(algorithm: Algorithm) -> Algorithm:
    """Return the algorithm for a run whose longest answer has `LONGEST` tokens."""
    return dataclasses.replace(algorithm, overlong_tokens=LONGEST, overlong_tail=LONGEST // 2)


def distances(found: Mapping[str, Tensor]) -> dict[str, dict[str, float]]:
    """Return 1 − cosine of every pair of gradients, by both names: 0 for the same direction, 1 for orthogonal
    ones."""
    flat = {name: each.flatten() / each.norm() for name, each in found.items()}
    # Half the squared distance of unit vectors is 1 − cosine, without the cancellation next to 1.
    return {
        name: {other: float((one - two).square().sum() / 2) for other, two in flat.items()}
        for name, one in flat.items()
    }


def norms(found: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the norm of every gradient, divided by that of grpo."""
    return {name: float(each.norm() / found["grpo"].norm()) for name, each in found.items()}
