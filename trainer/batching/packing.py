"""Sequences into rows, rows into micro-batches.

- padded: a sequence a row, rows of similar length together. What is before a token is what it sees: no mask.
- packed: several sequences a row; positions restart with each, and the model derives the document mask from them.
  Rows are kept short (512 tokens or so), since attention under a mask costs the square of their length.
- tree: a prefix that sequences share is computed once (`batching/tree.py`); where nothing is shared it is padded.

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
"""A token of a constrained turn whose log-probability is above this was the only one that could come."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MiniBatch:
    """What one optimiser step learns from. `denominator` is the count that its summed loss is divided by. `rewards`
    are those of its trajectories, by their index in the batch, where a critic makes the advantages of them."""

    micro_batches: tuple[MicroBatch, ...]
    denominator: int
    rewards: Mapping[int, RewardTree] = field(default_factory=dict)
    rewarded: frozenset[int] = frozenset()
    """Trajectories with a reward, by their index in the batch; only where advantages are normalised over tokens."""

    @property
    def trained_tokens(self) -> int:
        return sum(micro_batch.targets_N.numel() for micro_batch in self.micro_batches)


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """What one forward and backward takes. Per trained token: `predictor_N` is where it is predicted, an index into
    the flattened BT (that of the token before it in its sequence; sequences that share their past share it);
    `trajectory_N` indexes the batch, `turn_N` its trajectory's turns, `answer_N` the answers in this micro-batch,
    each whole in it; `staleness_N` is in versions. `reach_BT` is where in its row the tokens end that see a token
    (`batching/tree.py`); None: positions say it all. `lengths_B` are those of the rows without padding,
    `sequence_tokens` those of all sequences, which are more where prefixes are shared.
    `altered_N` marks tokens that were drawn from another distribution than the policy's own at that temperature: a
    grammar, a penalty or a bias had changed it, or top-p and the like had cut it. `forced_N` marks tokens to which a
    grammar left no alternative: they have no advantage, since nobody chose them. With a critic there are no
    advantages yet.

    `learns` false: there is no gradient, so a forward pass for the record is all that it takes."""

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
        """What a policy scores of it."""
        return Rows(
            self.input_ids_BT,
            self.position_ids_BT,
            self.predictor_N,
            self.targets_N,
            self.temperature_N,
            self.reach_BT,
        )

    def at_temperature_one(self) -> MicroBatch:
        """Return the micro-batch for a policy that is trained as it is at temperature 1.

        What acted on tokens drawn at another temperature is then another distribution, as with a penalty: its
        log-probabilities weigh the gradient, and are no measure of the engine or of a proximal policy.
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
    """The parts of a batch that are learnt from one after the other. Trajectories are dealt out in turn, so that a
    group's members are spread; a part from which nothing would be learnt joins the one before it."""
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
    """What the summed loss of these sequences is divided by; 1 at least."""
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
    return algorithm.learns_from(advantages[sequence.trajectory][span.turn] for span in sequence.spans)


def pack(
    batch: Batch,
    advantages: Sequence[Sequence[float]],
    sequences: Sequence[TrainingSequence],
    settings: BatchSettings,
    algorithm: Algorithm,
) -> list[MicroBatch]:
    """The micro-batches of a batch. `advantages[i][t]` belongs to turn t of trajectory i.

    Sequences that teach something and sequences that do not are packed apart.
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
    """The rows of each micro-batch."""
    bound = settings.max_tokens_per_microbatch
    if settings.packing is Packing.PACKED:
        members = pack_rows([len(sequence) for sequence in sequences], settings.packed_row_tokens)
        rows = [single_row(sequences, row) for row in members]
        return [[rows[index] for index in part] for part in split_rows([len(row) for row in rows], bound)]
    if settings.packing is Packing.TREE:
        return even_parts(tree_rows(sequences, bound), bound)
    return even_parts([single_row(sequences, [index]) for index in range(len(sequences))], bound)


def pack_rows(lengths: Sequence[int], row_tokens: int) -> list[list[int]]:
    """First-fit decreasing: indices of the sequences of each row, whose lengths sum to at most `row_tokens`.

    A longer sequence has a row of its own.
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
    """Rows of similar length together: indices of the rows of each micro-batch, padded to at most `max_tokens`.

    A row longer than that is a micro-batch of its own.
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
    """A micro-batch without tokens: a rank without work takes part in the collectives of its peers with it."""
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
        # A jump back would make the model look for documents, and mask what needs none.
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
