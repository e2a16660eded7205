"""Divide token trees into linear sequences, one per end of a path, with every trained token in exactly one of
them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from proxy.contract.trajectory import Trajectory
from trainer.batching.staleness import is_trained


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedSpan:
    """The place of a turn's whole output in a sequence: `ids[start : start + length]`, with `start` at least 1.

    `redacted` of these tokens are placeholders, which are context.
    """

    turn: int
    start: int
    length: int
    redacted: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingSequence:
    """Token ids of one path, and the spans of them that are trained.

    `trajectory` is an index into the batch. `hinted`: an answer in it has feedback in words. Ids outside `spans` are
    context: prompts, tool results, and outputs that are trained in another sequence or not at all.
    """

    trajectory: int
    ids: tuple[int, ...]
    spans: tuple[TrainedSpan, ...]
    hinted: bool = False

    @property
    def trained_tokens(self) -> int:
        return sum(span.length - span.redacted for span in self.spans)


def linearise(trajectories: Sequence[Trajectory]) -> list[TrainingSequence]:
    """Return the training sequences of all trajectories of a batch, in order."""
    return [
        sequence
        for index, trajectory in enumerate(trajectories)
        for sequence in training_sequences(trajectory, index)
    ]


def training_sequences(trajectory: Trajectory, index: int) -> list[TrainingSequence]:
    """Return one sequence for every turn whose whole path no later turn continues, up to its last trained token.

    An output on several paths is trained in the first of them and context in the others. An output of which a later
    turn continues only a part (the agent edited its history) ends a path of its own, so it is still trained whole.
    """
    turns = trajectory.turns
    paths: list[tuple[int, ...]] = []
    spans: list[tuple[TrainedSpan, ...]] = []
    continued: set[int] = set()
    for number, turn in enumerate(turns):
        prefix: tuple[int, ...] = ()
        inherited: tuple[TrainedSpan, ...] = ()
        if turn.parent is not None:
            prefix = paths[turn.parent][: turn.prefix_tokens]
            inherited = tuple(span for span in spans[turn.parent] if span.start + span.length <= turn.prefix_tokens)
            if turn.prefix_tokens == len(paths[turn.parent]):
                continued.add(turn.parent)
        prompt = prefix + turn.prompt_ids
        own: tuple[TrainedSpan, ...] = ()
        if is_trained(turn):
            length = len(turn.output_ids)
            redacted = length - len(turn.learnt)
            own = (TrainedSpan(turn=number, start=len(prompt), length=length, redacted=redacted),)
        paths.append(prompt + turn.output_ids)
        spans.append(inherited + own)

    sequences = []
    trained: set[int] = set()
    for number in range(len(turns)):
        if number in continued:
            continue
        fresh = tuple(span for span in spans[number] if span.turn not in trained)
        if fresh:
            trained.update(span.turn for span in fresh)
            ids = paths[number][: fresh[-1].start + fresh[-1].length]
            hinted = any(turns[span.turn].hints for span in fresh)
            sequences.append(TrainingSequence(trajectory=index, ids=ids, spans=fresh, hinted=hinted))
    return sequences
