"""Sequences that the hindsight teacher reads: the policy's own tokens, with the hints of the feedback in the prompts.

Axes: N trained tokens of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from proxy.contract.arrays import unpack_ids
from proxy.contract.trajectory import Trajectory
from trainer.batching.sequences import TrainedSpan, TrainingSequence, linearise
from trainer.batching.staleness import is_trained
from trainer.batching.teaching import Taught


class HindsightFigures(NamedTuple):
    """Counts of the answers with hints and of those among them that were ignored; the number of tokens of the others,
    and the sum of |shift| over these."""

    answers: int
    ignored: int
    tokens: int
    distance: float


class Shift(NamedTuple):
    """By how much the texts changed the log-probabilities of tokens.

    `shift_N` is teacher − policy, 0 for tokens without a hint; `hinted_N` marks the tokens with one, `ignored_N`
    those among them whose answer the texts changed too little. `answers` and `ignored` count answers alike.
    """

    shift_N: Tensor
    hinted_N: Tensor
    ignored_N: Tensor
    answers: int
    ignored: int


def has_hints(trajectory: Trajectory) -> bool:
    """Return whether a trained turn of the trajectory has a hint."""
    return any(turn.hints and is_trained(turn) for turn in trajectory.turns)


def teacher_sequences(trajectories: Sequence[Trajectory]) -> list[TrainingSequence]:
    """Return the sequences with hints, in which every trained turn that has one is in exactly one span.

    Turns of one path that have the same hints share a sequence. A turn with a text of its own has another one, so
    that the teacher reads a text about one turn for that turn alone.
    """
    found: list[TrainingSequence] = []
    for sequence in linearise(trajectories):
        trajectory = trajectories[sequence.trajectory]
        by_hints: dict[tuple[tuple[int, int], ...], list[TrainedSpan]] = {}
        for span in sequence.spans:
            if hints := trajectory.turns[span.turn].hints:
                by_hints.setdefault(hints, []).append(span)
        for hints, spans in by_hints.items():
            pieces = [(place, unpack_ids(trajectory.hints[index])) for place, index in hints]
            found.append(_with_pieces(sequence, spans, pieces))
    return found


def _with_pieces(
    sequence: TrainingSequence, spans: Sequence[TrainedSpan], pieces: Sequence[tuple[int, tuple[int, ...]]]
) -> TrainingSequence:
    """Return the sequence up to the last of `spans`, with the pieces inserted before the tokens at their places."""
    ids: list[int] = []
    before = 0
    # Stable: of two pieces at one place, the text about the session comes before the text about the turn.
    for place, piece in sorted(pieces, key=lambda each: each[0]):
        ids += [*sequence.ids[before:place], *piece]
        before = place
    ids += sequence.ids[before : spans[-1].start + spans[-1].length]
    inserted = sum(len(piece) for _, piece in pieces)
    return TrainingSequence(
        trajectory=sequence.trajectory,
        ids=tuple(ids),
        spans=tuple(
            TrainedSpan(turn=span.turn, start=span.start + inserted, length=span.length, redacted=span.redacted)
            for span in spans
        ),
    )


def by_turn(trajectory_N: Tensor, turn_N: Tensor, logprobs_N: Tensor) -> dict[tuple[int, int], list[float]]:
    """Return the log-probabilities of each turn's tokens, which follow each other in N."""
    found: dict[tuple[int, int], list[float]] = {}
    for trajectory, turn, value in zip(
        trajectory_N.tolist(), turn_N.tolist(), logprobs_N.double().tolist(), strict=True
    ):
        found.setdefault((trajectory, turn), []).append(value)
    return found


def shift_of(
    trajectory_N: Tensor, turn_N: Tensor, logprobs_N: Tensor, hinted: Taught, *, clip: float, floor: float
) -> Shift:
    """Return clip(teacher − policy, ±`clip`) for every token.

    An answer whose mean of |teacher − policy| is below `floor` is ignored: its texts say nothing about it.
    """
    teacher: list[float] = []
    marked: list[bool] = []
    ignored: list[bool] = []
    answers = silenced = 0
    for key, own in by_turn(trajectory_N, turn_N, logprobs_N).items():
        scores = list(hinted.get(key, own))
        apart = sum(abs(theirs - ours) for theirs, ours in zip(scores, own, strict=True)) / len(own)
        silent = key in hinted and apart < floor
        answers += key in hinted
        silenced += silent
        teacher += own if silent else scores
        marked += [key in hinted] * len(own)
        ignored += [silent] * len(own)
    shift_N = (torch.tensor(teacher, dtype=torch.float64) - logprobs_N.double().cpu()).clamp(-clip, clip)
    hinted_N = torch.tensor(marked, dtype=torch.bool)
    return Shift(
        torch.where(hinted_N, shift_N, 0.0).float().to(logprobs_N.device),
        hinted_N,
        torch.tensor(ignored, dtype=torch.bool),
        answers,
        silenced,
    )


def hindsight_figures(shifts: Sequence[Shift]) -> HindsightFigures | None:
    """Return the figures of one rank's micro-batches; None without any."""
    if not shifts:
        return None
    learnt = [each.shift_N.cpu()[each.hinted_N & ~each.ignored_N].double().abs() for each in shifts]
    return HindsightFigures(
        answers=sum(each.answers for each in shifts),
        ignored=sum(each.ignored for each in shifts),
        tokens=sum(each_N.numel() for each_N in learnt),
        distance=sum(each_N.sum().item() for each_N in learnt),
    )


def joined_figures(parts: Sequence[HindsightFigures | None]) -> HindsightFigures | None:
    """Return the sums over all ranks; None if no rank has figures."""
    known = [part for part in parts if part is not None]
    return HindsightFigures(*map(sum, zip(*known, strict=True))) if known else None
