"""Lay out sequences in rows, and rows in micro-batches.

- padded: one sequence in a row, rows of similar length together. A token sees all tokens before it: no mask.
- packed: several sequences in a row; positions restart with each, and the model derives the document mask from them.
  Rows are short (about 512 tokens), because attention under a mask costs the square of their length.
- tree: a prefix that sequences share is computed once (`batching/tree.py`). Without shared prefixes, as padded.

Axes: B rows, T tokens of the longest row, N trained tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from proxy.contract.trajectory import TrajectoryTurn
from proxy.contract.turn import LogprobConvention
from trainer.algorithm.advantages import continued
from trainer.algorithm.gae import RewardTree
from trainer.algorithm.parts import Algorithm
from trainer.batching.grouping import Batch
from trainer.batching.sequences import TrainingSequence
from trainer.batching.tree import Row, even_parts, single_row, tree_rows
from trainer.config import BatchSettings, Denominator, Packing
from trainer.models.passes import Rows

_Value = TypeVar("_Value")

CERTAIN = -1e-5
"""A token of a constrained turn with a log-probability above this was the only one that the grammar allowed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MiniBatch:
    """The part of a batch that one optimiser step learns from.

    The summed loss is divided by `denominator`. `rewards`, only for a critic, are the rewards that it makes the
    advantages from, by index of the trajectory in the batch.
    """

    micro_batches: tuple[MicroBatch, ...]
    denominator: int
    rewards: Mapping[int, RewardTree] = field(default_factory=dict)
    rewarded: frozenset[int] = frozenset()
    """Indices in the batch of the trajectories with a reward; only for advantages that are normalised over tokens."""

    @property
    def trained_tokens(self) -> int:
        return sum(micro_batch.targets_N.numel() for micro_batch in self.micro_batches)


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """The tensors of one forward and backward pass.

    Per trained token: `predictor_N` is the index into the flattened BT of the token before it in its sequence, where
    it is predicted (sequences that share a prefix share it); `trajectory_N` indexes the batch, `turn_N` the turns of
    that trajectory, `answer_N` the answers in this micro-batch, each of which it contains whole; `staleness_N` is in
    versions. `altered_N` marks tokens that were drawn from another distribution than the policy's own at that
    temperature: a grammar, a penalty or a bias changed it, or top-p, top-k or min-p cut it. `forced_N` marks tokens
    to which a grammar left no alternative: the policy did not choose them, so their advantage is 0. With a critic,
    `advantages_N` holds no advantages yet.

    `reach_BT` is the index in its row where the tokens that see a token end (`batching/tree.py`); None if positions
    alone define the mask. `lengths_B` are the lengths of the rows without padding. `sequence_tokens` is the sum of
    the lengths of all sequences, which is larger if they share prefixes.

    `learns` is False for a micro-batch without any gradient: it needs a forward pass only, for the record.
    """

    learns: bool
    input_ids_BT: Tensor
    position_ids_BT: Tensor
    predictor_N: Tensor
    targets_N: Tensor
    temperature_N: Tensor
    behaviour_N: Tensor
    advantages_N: Tensor
    staleness_N: Tensor
    trajectory_N: Tensor
    turn_N: Tensor
    answer_N: Tensor
    altered_N: Tensor
    forced_N: Tensor
    lengths_B: Tensor
    sequence_tokens: int
    reach_BT: Tensor | None = None

    @property
    def rows(self) -> Rows:
        """The tensors that a policy needs to score the trained tokens."""
        return Rows(
            self.input_ids_BT,
            self.position_ids_BT,
            self.predictor_N,
            self.targets_N,
            self.temperature_N,
            self.reach_BT,
        )

    def at_temperature_one(self) -> MicroBatch:
        """Return the micro-batch for training the policy's distribution at temperature 1.

        Tokens that were drawn at another temperature then come from another distribution, as with a penalty: their
        recorded log-probabilities weigh the gradient, but do not measure the engine or a proximal policy.
        """
        return replace(
            self,
            temperature_N=torch.ones_like(self.temperature_N),
            altered_N=self.altered_N | (self.temperature_N != 1),
        )

    def to(self, device: torch.device) -> MicroBatch:
        moved: dict[str, Any] = {
            name: each.to(device) if isinstance(each := getattr(self, name), Tensor) else each
            for name in self.__slots__
        }
        return MicroBatch(**moved)


def mini_batches(
    batch: Batch,
    advantages: Sequence[Sequence[float]],
    sequences: Sequence[TrainingSequence],
    settings: BatchSettings,
    algorithm: Algorithm,
) -> list[MiniBatch]:
    """Divide a batch into the mini-batches of its optimiser steps.

    Trajectories are dealt out in turn, which spreads the members of a group over the mini-batches. A part without any
    signal joins the one before it, because a step from it would move the weights by momentum and decay alone.
    """
    parts: list[list[TrainingSequence]] = []
    for number in range(algorithm.mini_batches):
        part = [sequence for sequence in sequences if sequence.trajectory % algorithm.mini_batches == number]
        if parts and not any(_learns(sequence, advantages, algorithm) for sequence in part):
            parts[-1] += part
        elif parts and not any(_learns(sequence, advantages, algorithm) for sequence in parts[0]):
            parts[0] += part
        else:
            parts.append(part)
    return [
        MiniBatch(
            micro_batches=tuple(pack(batch, advantages, part, settings, algorithm)),
            denominator=denominator_of(algorithm, part, advantages),
            rewards=_rewards(batch, advantages, part) if algorithm.has_critic else {},
            rewarded=_rewarded(batch, part) if algorithm.whitens else frozenset(),
        )
        for part in parts
    ]


def _rewarded(batch: Batch, sequences: Sequence[TrainingSequence]) -> frozenset[int]:
    return frozenset(
        index
        for index in {sequence.trajectory for sequence in sequences}
        if batch.trajectories[index].reward is not None
        or any(turn.reward is not None for turn in batch.trajectories[index].turns)
    )


def _rewards(
    batch: Batch, rewards: Sequence[Sequence[float]], sequences: Sequence[TrainingSequence]
) -> dict[int, RewardTree]:
    return {
        index: RewardTree(
            parents=tuple(continued(batch.trajectories[index].turns)),
            rewards=tuple(rewards[index]),
            apart=frozenset(number for number, turn in enumerate(batch.trajectories[index].turns) if turn.superseded),
        )
        for index in sorted({sequence.trajectory for sequence in sequences})
    }


def denominator_of(
    algorithm: Algorithm, sequences: Sequence[TrainingSequence], advantages: Sequence[Sequence[float]]
) -> int:
    """Return the number by which the summed loss of these sequences is divided, at least 1."""
    counted = [one for one in sequences if not algorithm.drop_degenerate or _learns(one, advantages, algorithm)]
    answers = sum(span.length > span.redacted for sequence in counted for span in sequence.spans)
    counts = {
        Denominator.TOKENS: sum(sequence.trained_tokens for sequence in counted),
        Denominator.SEQUENCES: len(counted),
        Denominator.ANSWERS: answers,
        Denominator.CONSTANT: answers * algorithm.constant_tokens,
    }
    return max(1, counts[algorithm.denominator])


def _learns(sequence: TrainingSequence, advantages: Sequence[Sequence[float]], algorithm: Algorithm) -> bool:
    if sequence.hinted and algorithm.learns_from_words:
        return True
    return algorithm.learns_from(advantages[sequence.trajectory][span.turn] for span in sequence.spans)


def pack(
    batch: Batch,
    advantages: Sequence[Sequence[float]],
    sequences: Sequence[TrainingSequence],
    settings: BatchSettings,
    algorithm: Algorithm,
) -> list[MicroBatch]:
    """Return the micro-batches of these sequences. `advantages[i][t]` belongs to turn t of trajectory i.

    Sequences with and without a signal are packed apart, because the latter need no backward pass.
    """
    kinds: dict[bool, list[TrainingSequence]] = {True: [], False: []}
    for sequence in sequences:
        kinds[_learns(sequence, advantages, algorithm)].append(sequence)
    return [
        _micro_batch(batch, advantages, kind, rows, learns, settings.packing)
        for learns, kind in kinds.items()
        for rows in _rows([sequence.ids for sequence in kind], settings)
    ]


def _rows(sequences: Sequence[Sequence[int]], settings: BatchSettings) -> list[list[Row]]:
    """Return the rows of each micro-batch, which hold indices of `sequences`."""
    bound = settings.max_tokens_per_microbatch
    if settings.packing is Packing.PACKED:
        members = pack_rows([len(sequence) for sequence in sequences], settings.packed_row_tokens)
        rows = [single_row(sequences, row) for row in members]
        return [[rows[index] for index in part] for part in split_rows([len(row) for row in rows], bound)]
    if settings.packing is Packing.TREE:
        return even_parts(tree_rows(sequences, bound), bound)
    return even_parts([single_row(sequences, [index]) for index in range(len(sequences))], bound)


def pack_rows(lengths: Sequence[int], row_tokens: int) -> list[list[int]]:
    """Assign sequences to rows by first-fit decreasing, and return the indices of each row's sequences.

    The lengths in a row sum to at most `row_tokens`; a longer sequence has a row of its own.
    """
    rows: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        length = lengths[index]
        row = next((number for number, free in enumerate(room) if free >= length), None)
        if row is None:
            rows.append([index])
            room.append(row_tokens - length)
        else:
            rows[row].append(index)
            room[row] -= length
    return rows


def split_rows(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Put rows of similar length together, and return the indices of each micro-batch's rows.

    A micro-batch has at most `max_tokens` tokens with padding; a longer row is a micro-batch of its own.
    """
    parts: list[list[int]] = []
    longest = 0
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        if parts and longest * (len(parts[-1]) + 1) <= max_tokens:
            parts[-1].append(index)
        else:
            parts.append([index])
            longest = lengths[index]
    return parts


def idle_micro_batch(learns: bool) -> MicroBatch:
    """Return a micro-batch without trained tokens, with which a rank without work joins its peers' collectives."""
    nothing = Batch(trajectories=(), groups=(), base_version=0)
    sequence = TrainingSequence(trajectory=0, ids=(0,), spans=())
    return _micro_batch(nothing, (), [sequence], [single_row([sequence.ids], [0])], learns, Packing.PADDED)


def _micro_batch(
    batch: Batch,
    advantages: Sequence[Sequence[float]],
    sequences: Sequence[TrainingSequence],
    rows: Sequence[Row],
    learns: bool,
    packing: Packing,
) -> MicroBatch:
    width = max(len(row) for row in rows)
    masked = packing is Packing.TREE and any(row.branched for row in rows)
    ids: list[int] = []
    positions: list[int] = []
    reach: list[int] = []
    predictors: list[int] = []
    targets: list[int] = []
    temperatures: list[float] = []
    behaviour: list[float] = []
    credited: list[float] = []
    staleness: list[int] = []
    owners: list[int] = []
    turns: list[int] = []
    answers: list[int] = []
    altered: list[bool] = []
    forced: list[bool] = []
    for number, row in enumerate(rows):
        offset = len(ids)
        for member, places in zip(row.members, row.places, strict=True):
            sequence = sequences[member]
            for span in sequence.spans:
                turn = batch.trajectories[sequence.trajectory].turns[span.turn]
                learnt = turn.learnt
                first = span.start - 1
                predictors.extend(offset + places[first + position] for position in learnt)
                targets.extend(_at(turn.output_ids, learnt))
                temperatures.extend([turn.temperature] * len(learnt))
                behaviour.extend(_at(turn.logprobs, learnt))
                credited.extend(_at(_credited(turn, advantages[sequence.trajectory][span.turn]), learnt))
                altered.extend([turn.convention is not LogprobConvention.SAMPLED] * len(learnt))
                forced.extend(_at(_forced(turn), learnt))
                stale: list[int] = []
                for version_span in turn.spans:
                    stale.extend(
                        [batch.base_version - version_span.version] * (version_span.end - version_span.start)
                    )
                staleness.extend(_at(stale, learnt))
                owners.extend([sequence.trajectory] * len(learnt))
                turns.extend([span.turn] * len(learnt))
                answers.extend([answers[-1] + 1 if answers else 0] * len(learnt))
        ids.extend(row.ids)
        positions.extend(row.positions)
        reach.extend(row.reach)
        padding = (number + 1) * width - len(ids)
        ids.extend([0] * padding)
        # Without packing, padding continues the positions: a restart would look like a second document, and the model
        # would build a mask that is not needed.
        positions.extend(range(padding) if packing is Packing.PACKED else range(len(row), width))
        reach.extend(range(len(row) + 1, width + 1))
    return MicroBatch(
        learns=learns,
        input_ids_BT=torch.tensor(ids).view(len(rows), width),
        position_ids_BT=torch.tensor(positions).view(len(rows), width),
        predictor_N=torch.tensor(predictors, dtype=torch.long),
        targets_N=torch.tensor(targets, dtype=torch.long),
        temperature_N=torch.tensor(temperatures, dtype=torch.float32),
        behaviour_N=torch.tensor(behaviour, dtype=torch.float32),
        advantages_N=torch.tensor(credited, dtype=torch.float32),
        staleness_N=torch.tensor(staleness, dtype=torch.float32),
        trajectory_N=torch.tensor(owners, dtype=torch.long),
        turn_N=torch.tensor(turns, dtype=torch.long),
        answer_N=torch.tensor(answers, dtype=torch.long),
        altered_N=torch.tensor(altered, dtype=torch.bool),
        forced_N=torch.tensor(forced, dtype=torch.bool),
        reach_BT=torch.tensor(reach).view(len(rows), width) if masked else None,
        lengths_B=torch.tensor([len(row) for row in rows]),
        sequence_tokens=sum(len(sequences[member].ids) for row in rows for member in row.members),
    )


def _at(values: Sequence[_Value], positions: Sequence[int]) -> Sequence[_Value]:
    """Return the values at these positions of a turn: all of them unless something was redacted."""
    return values if len(positions) == len(values) else [values[position] for position in positions]


def _forced(turn: TrajectoryTurn) -> list[bool]:
    if turn.convention is not LogprobConvention.CONSTRAINED:
        return [False] * len(turn.output_ids)
    return [logprob >= CERTAIN for logprob in turn.logprobs]


def _credited(turn: TrajectoryTurn, advantage: float) -> list[float]:
    """Return the advantage of each of a turn's tokens."""
    return [0.0 if forced else advantage for forced in _forced(turn)]
