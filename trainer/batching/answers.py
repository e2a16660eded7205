"""Mask or drop the answers of a batch that were cut, drawn from a cut distribution, or caught by a filter.

A masked answer stays in its sequence as context. Its tokens have no loss and count in no denominator; the other
answers of its session keep their advantages, and the session's reward stays in its group's baseline. Dropping a whole
trajectory removes its reward from the baseline too. A trajectory whose answers are all masked is compared with its
group and then skipped, with the reason. A superseded answer has no part in the session's reward, so it is masked
alone.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from proxy.contract.claim import SUPERSEDED, AnswerFault, MaskedTurn, SkipReason
from proxy.contract.identifiers import SessionId
from proxy.contract.trajectory import Trajectory
from proxy.contract.turn import Cut, LogprobConvention
from trainer.algorithm.advantages import Advantages
from trainer.algorithm.parts import Algorithm
from trainer.batching.filters import caught_by
from trainer.batching.grouping import Batch
from trainer.batching.staleness import is_trained
from trainer.config import FilterAction, Truncated, TruncatedSampling

_CUT = {Cut.LENGTH: AnswerFault.LENGTH, Cut.INTERRUPTED: AnswerFault.INTERRUPTED}
_SKIPS = {
    AnswerFault.LENGTH: SkipReason.TRUNCATED,
    AnswerFault.INTERRUPTED: SkipReason.TRUNCATED,
    AnswerFault.SAMPLING: SkipReason.SAMPLING,
    AnswerFault.REPETITION: SkipReason.REPETITION,
    AnswerFault.GIBBERISH: SkipReason.GIBBERISH,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class JudgedAnswers:
    """The trajectories to compare, and the faults of their answers.

    `compared` has the rewards that baselines and advantages are made from; `batch` has the rewards as given.
    `faults[i]` maps the turns of trajectory i to mask to their faults. `dropped` trajectories are removed before any
    comparison. `masked` lists the turns that are not trained, with reasons, for all sessions including dropped ones.
    `answers` counts the answers that would be trained without faults, `cut` those of them that were cut.
    """

    batch: Batch
    compared: tuple[Trajectory, ...]
    faults: tuple[Mapping[int, AnswerFault], ...]
    dropped: tuple[tuple[Trajectory, SkipReason], ...]
    masked: Mapping[SessionId, tuple[MaskedTurn, ...]]
    answers: int
    cut: int

    def without_masked(
        self, advantages: Advantages
    ) -> tuple[Batch, Advantages, tuple[tuple[Trajectory, SkipReason], ...]]:
        """Return the batch with its answers masked, its advantages, and the trajectories without any trained answer.

        The running means in the advantages include every compared trajectory.
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
        """Return the number of answers, the share that was cut, and the number masked for each reason."""
        reasons = Counter(turn.reason for turns in self.masked.values() for turn in turns)
        return {
            "answers": float(self.answers),
            "cut_answer_share": self.cut / self.answers if self.answers else 0.0,
            **{f"masked_{fault.value}": float(reasons[fault.value]) for fault in AnswerFault},
        }


def judge(batch: Batch, algorithm: Algorithm) -> JudgedAnswers:
    """Find the answers with faults, and sort the trajectories by what the algorithm does about these."""
    kept: list[int] = []
    compared: list[Trajectory] = []
    faults: list[Mapping[int, AnswerFault]] = []
    dropped: list[tuple[Trajectory, SkipReason]] = []
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
    """Return the superseded turns that are not trained because they have no reward of their own."""
    return [
        number
        for number, turn in enumerate(trajectory.turns)
        if turn.superseded and turn.trainable and not is_trained(turn)
    ]


def _faults(trajectory: Trajectory, algorithm: Algorithm) -> dict[int, AnswerFault]:
    """Return the faults of the turns that would be trained otherwise, by number of the turn."""
    found: dict[int, AnswerFault] = {}
    leaves_out_cut = algorithm.truncated in (Truncated.MASK, Truncated.DROP)
    leaves_out_sampling = algorithm.truncated_sampling is TruncatedSampling.MASK
    for number, turn in enumerate(trajectory.turns):
        if not is_trained(turn):
            continue
        if turn.cut is not None and leaves_out_cut:
            found[number] = _CUT[turn.cut]
        elif turn.convention is LogprobConvention.UNTRUNCATED and leaves_out_sampling:
            found[number] = AnswerFault.SAMPLING
        elif (caught := caught_by(turn, algorithm.filters)) is not None:
            found[number] = caught
    return found


def _drops(fault: AnswerFault, algorithm: Algorithm) -> bool:
    """Whether an answer with this fault drops its whole trajectory."""
    if _SKIPS[fault] is SkipReason.TRUNCATED:
        return algorithm.truncated is Truncated.DROP
    if fault is AnswerFault.SAMPLING:
        return False
    return algorithm.filters.action is FilterAction.DROP


def _as_compared(trajectory: Trajectory, algorithm: Algorithm) -> Trajectory:
    """Return the trajectory with the rewards for the comparison: with `truncated = "zero_reward"`, a cut answer sets
    its turn's reward and its session's to 0."""
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


def _with_masked(trajectory: Trajectory, faults: Mapping[int, AnswerFault]) -> Trajectory:
    if not faults:
        return trajectory
    turns = tuple(
        msgspec.structs.replace(turn, trainable=False) if number in faults else turn
        for number, turn in enumerate(trajectory.turns)
    )
    return msgspec.structs.replace(trajectory, turns=turns)


def _skip(faults: Mapping[int, AnswerFault]) -> SkipReason:
    """Return why a trajectory is skipped: the fault of its last faulty answer, because there it ended."""
    return _SKIPS[faults[max(faults)]]
