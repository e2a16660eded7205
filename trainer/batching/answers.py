"""Mask the answers of a batch that were cut, that were drawn from a cut distribution or that a filter catches, or
treat them as the algorithm chooses.

A masked answer stays in its sequence as context. Its tokens have no loss and are in no denominator; the other answers
of its session keep their advantages, and the session's reward stays in its group's baseline. Leaving out a whole
trajectory takes its reward out of the baseline too. A trajectory whose answers are all masked is compared with its
group and then skipped, with the reason. A superseded answer has nothing of the session's reward: it is masked alone.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from proxy.contract.claim import MaskedTurn
from proxy.contract.identifiers import SessionId
from proxy.contract.trajectory import Trajectory
from proxy.contract.turn import Cut, LogprobConvention
from trainer.algorithm.advantages import Advantages
from trainer.algorithm.parts import Algorithm
from trainer.batching.filters import Fault, caught_by
from trainer.batching.grouping import Batch
from trainer.batching.staleness import Skip, is_trained
from trainer.config import FilterAction, Truncated, TruncatedSampling

SUPERSEDED = "superseded"
"""The reason of an answer that the agent left behind for another one to the same prompt."""

_CUT = {Cut.LENGTH: Fault.LENGTH, Cut.INTERRUPTED: Fault.INTERRUPTED}
_SKIPS = {
    Fault.LENGTH: Skip.TRUNCATED,
    Fault.INTERRUPTED: Skip.TRUNCATED,
    Fault.SAMPLING: Skip.SAMPLING,
    Fault.REPETITION: Skip.REPETITION,
    Fault.GIBBERISH: Skip.GIBBERISH,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class JudgedAnswers:
    """The trajectories to compare, and what is found about their answers.

    `compared` have the rewards that baselines and advantages are made from, `batch` has those that were given.
    `faults[i]` are the turns of trajectory i to mask. `dropped` are left out before any comparison. `masked` says of
    all sessions, dropped ones included, which turns are not trained and why. `answers` counts those that would be
    trained, `cut` how many of them were cut, whatever is done about them.
    """

    batch: Batch
    compared: tuple[Trajectory, ...]
    faults: tuple[Mapping[int, Fault], ...]
    dropped: tuple[tuple[Trajectory, Skip], ...]
    masked: Mapping[SessionId, tuple[MaskedTurn, ...]]
    answers: int
    cut: int

    def without_masked(self, advantages: Advantages) -> tuple[Batch, Advantages, tuple[tuple[Trajectory, Skip], ...]]:
        """Return what is trained: the batch with its answers masked, its advantages, and what was left without any.

        The running means in the advantages have seen every compared trajectory.
        """
        masked = [
            _with_masked(trajectory, faults)
            for trajectory, faults in zip(self.batch.trajectories, self.faults, strict=True)
        ]
        kept = [index for index, each in enumerate(masked) if any(map(is_trained, each.turns))]
        emptied = tuple(
            (self.batch.trajectories[index], _skip(self.faults[index]))
            for index in sorted(set(range(len(masked))) - set(kept))
        )
        batch = dataclasses.replace(self.batch, trajectories=tuple(masked)).only(kept)
        trained = [[is_trained(turn) for turn in trajectory.turns] for trajectory in batch.trajectories]
        return batch, advantages.only(kept).where(trained), emptied

    def metrics(self) -> dict[str, float]:
        """Return how many answers there were, the share that was cut, and how many were masked, by reason."""
        reasons = Counter(turn.reason for turns in self.masked.values() for turn in turns)
        return {
            "answers": float(self.answers),
            "cut_answer_share": self.cut / self.answers if self.answers else 0.0,
            **{f"masked_{fault.value}": float(reasons[fault.value]) for fault in Fault},
        }


def judge(batch: Batch, algorithm: Algorithm) -> JudgedAnswers:
    """Find the answers that are not to be trained as they are, and what the algorithm does about them."""
    kept: list[int] = []
    compared: list[Trajectory] = []
    faults: list[Mapping[int, Fault]] = []
    dropped: list[tuple[Trajectory, Skip]] = []
    masked: dict[SessionId, tuple[MaskedTurn, ...]] = {}
    answers = cut = 0
    for index, trajectory in enumerate(batch.trajectories):
        found = _faults(trajectory, algorithm)
        ends = [turn.cut is not None for turn in trajectory.turns if is_trained(turn)]
        answers, cut = answers + len(ends), cut + sum(ends)
        reasons = {**dict.fromkeys(_left_behind(trajectory), SUPERSEDED), **found}
        if reasons:
            masked[trajectory.session_id] = tuple(
                MaskedTurn(turn_id=trajectory.turns[turn].id, reason=str(reason))
                for turn, reason in sorted(reasons.items())
            )
        fatal = {
            number: fault
            for number, fault in found.items()
            if _drops(fault, algorithm) and not trajectory.turns[number].superseded
        }
        if fatal:
            dropped.append((trajectory, _skip(fatal)))
            continue
        kept.append(index)
        faults.append(found)
        compared.append(_as_compared(trajectory, algorithm))
    return JudgedAnswers(
        batch=batch.only(kept),
        compared=tuple(compared),
        faults=tuple(faults),
        dropped=tuple(dropped),
        masked=masked,
        answers=answers,
        cut=cut,
    )


def _left_behind(trajectory: Trajectory) -> list[int]:
    """Return the superseded turns that are not trained, as they have no reward of their own."""
    return [
        number
        for number, turn in enumerate(trajectory.turns)
        if turn.superseded and turn.trainable and not is_trained(turn)
    ]


def _faults(trajectory: Trajectory, algorithm: Algorithm) -> dict[int, Fault]:
    """Return the turns that are not to be trained as they are, of those that would be."""
    found: dict[int, Fault] = {}
    leaves_out_cut = algorithm.truncated in (Truncated.MASK, Truncated.DROP)
    leaves_out_sampling = algorithm.truncated_sampling is TruncatedSampling.MASK
    for number, turn in enumerate(trajectory.turns):
        if not is_trained(turn):
            continue
        if turn.cut is not None and leaves_out_cut:
            found[number] = _CUT[turn.cut]
        elif turn.convention is LogprobConvention.UNTRUNCATED and leaves_out_sampling:
            found[number] = Fault.SAMPLING
        elif (caught := caught_by(turn, algorithm.filters)) is not None:
            found[number] = caught
    return found


def _drops(fault: Fault, algorithm: Algorithm) -> bool:
    """Whether an answer with this fault takes its whole trajectory out."""
    if _SKIPS[fault] is Skip.TRUNCATED:
        return algorithm.truncated is Truncated.DROP
    if fault is Fault.SAMPLING:
        return False
    return algorithm.filters.action is FilterAction.DROP


def _as_compared(trajectory: Trajectory, algorithm: Algorithm) -> Trajectory:
    """Return the trajectory with a reward of 0 for what was cut, if so chosen: its session's, and the turn's own."""
    if algorithm.truncated is not Truncated.ZERO_REWARD:
        return trajectory
    cut = [number for number, turn in enumerate(trajectory.turns) if is_trained(turn) and turn.cut is not None]
    turns = tuple(
        msgspec.structs.replace(turn, reward=0.0) if number in cut and turn.reward is not None else turn
        for number, turn in enumerate(trajectory.turns)
    )
    is_cut = any(not trajectory.turns[number].superseded for number in cut)
    reward = 0.0 if is_cut and trajectory.reward is not None else trajectory.reward
    return msgspec.structs.replace(trajectory, reward=reward, turns=turns)


def _with_masked(trajectory: Trajectory, faults: Mapping[int, Fault]) -> Trajectory:
    if not faults:
        return trajectory
    turns = tuple(
        msgspec.structs.replace(turn, trainable=False) if number in faults else turn
        for number, turn in enumerate(trajectory.turns)
    )
    return msgspec.structs.replace(trajectory, turns=turns)


def _skip(faults: Mapping[int, Fault]) -> Skip:
    """Return the reason of a trajectory that is left out: that of its last answer with a fault, where it ended."""
    return _SKIPS[faults[max(faults)]]
