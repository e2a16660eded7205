"""Prepare a claim for the learner: the trajectories to train, their advantages, their micro-batches.

These functions are pure and decide everything that a step learns from, so a replayed step learns from the same data.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from proxy.contract.claim import ClaimedBatch, SkipReason, TrajectoryAudit
from proxy.contract.trajectory import Trajectory
from trainer.algorithm.advantages import Advantages, assign
from trainer.algorithm.parts import Algorithm
from trainer.algorithm.running import RunningMeans
from trainer.algorithm.signal import levelled_groups, with_signal
from trainer.batching.answers import JudgedAnswers, judge
from trainer.batching.grouping import Batch, flatten
from trainer.batching.hindsight import has_hints, teacher_sequences
from trainer.batching.own_functions import with_own_advantages, without_filtered
from trainer.batching.packing import MicroBatch, MiniBatch, mini_batches, pack
from trainer.batching.sequences import linearise
from trainer.batching.staleness import drop_unusable
from trainer.config import BatchSettings, Packing
from trainer.errors import UserFunctionFailed


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """A claim, ready for the learner.

    `batch` holds the trajectories to train, with masked answers as context; `dropped` holds the trajectories that
    cannot be trained, with reasons. `left_out` holds trajectories without a signal, if the algorithm has the part
    `fill`. `advantages` belong to the batch and contain the running means after it, which include `left_out`.
    `levelled` counts the groups whose rewards differed until the reward's bounds or the overlong penalty made them
    equal. `judged` has the faults of the answers. `failure` is the reason why a user's own filter or advantage could
    not be used: then nothing is trained, and the running means do not change.
    """

    batch: Batch
    dropped: tuple[tuple[Trajectory, SkipReason], ...]
    advantages: Advantages
    judged: JudgedAnswers
    left_out: tuple[Trajectory, ...] = ()
    levelled: int = 0
    failure: str | None = None

    def packed(
        self, settings: BatchSettings, algorithm: Algorithm, packings: Collection[Packing] = tuple(Packing)
    ) -> list[MiniBatch]:
        """Return the mini-batches, one for each optimiser step. `packings` are the layouts that the model
        supports."""
        sequences, chosen = linearise(self.batch.trajectories), settings.taken_by(packings)
        return mini_batches(self.batch, self.advantages.turns, sequences, chosen, algorithm)

    def hinted(
        self, settings: BatchSettings, algorithm: Algorithm, packings: Collection[Packing] = tuple(Packing)
    ) -> list[MicroBatch]:
        """Return the answers with feedback in words as the hindsight teacher reads them; none if the algorithm does
        not learn from words."""
        if not algorithm.learns_from_words:
            return []
        sequences, chosen = teacher_sequences(self.batch.trajectories), settings.taken_by(packings)
        micro_batches = pack(self.batch, self.advantages.turns, sequences, chosen, algorithm)
        return [dataclasses.replace(each, learns=False) for each in micro_batches]

    @property
    def has_signal(self) -> bool:
        """Whether some answer has an advantage or feedback in words."""
        return not self.advantages.all_zero or any(map(has_hints, self.batch.trajectories))

    def explained(self, audits: Sequence[TrajectoryAudit]) -> list[TrajectoryAudit]:
        """Return the audits, each with the answers of its session that were not trained and the reasons."""
        masked = self.judged.masked
        return [msgspec.structs.replace(audit, masked=masked.get(audit.session_id, ())) for audit in audits]


def prepare(
    claimed: ClaimedBatch,
    version: int,
    settings: BatchSettings,
    algorithm: Algorithm,
    means: RunningMeans,
    vocabulary: int,
) -> Prepared:
    """Prepare a claim for a step from `version`. `means` are the running means before it.

    `vocabulary` is the model's number of token ids. Advantages are computed before answers are masked, so that the
    reward of a masked answer stays in the baseline of its group.
    """
    whole = flatten(claimed.groups, version)
    usable, unusable = drop_unusable(
        whole, settings.max_staleness, vocabulary, from_words=algorithm.learns_from_words
    )
    dropped = tuple((whole.trajectories[index], reason) for index, reason in unusable.items())
    try:
        usable, filtered = without_filtered(usable, algorithm)
        judged = judge(usable, algorithm)
        compared = assign(judged.compared, judged.batch.groups, algorithm, means)
        compared = with_own_advantages(compared, judged.compared, judged.batch.groups, algorithm)
    except UserFunctionFailed as error:
        return _failed(whole, unusable, algorithm, means, str(error))
    batch, advantages, emptied = judged.without_masked(compared)
    trained: Sequence[int] = range(len(batch.groups))
    if algorithm.fill:
        hinted = [algorithm.learns_from_words and has_hints(each) for each in batch.trajectories]
        trained = with_signal(
            batch.groups,
            [(*turns, float(has)) for turns, has in zip(advantages.turns, hinted, strict=True)],
        )
    rest = set(range(len(batch.groups))).difference(trained)
    return Prepared(
        batch=batch.only(trained),
        dropped=(*dropped, *filtered, *judged.dropped, *emptied),
        advantages=advantages.only(trained),
        judged=judged,
        left_out=tuple(batch.trajectories[index] for index in sorted(rest)),
        levelled=levelled_groups(judged.compared, judged.batch.groups, algorithm),
    )


def _failed(
    whole: Batch, dropped: Mapping[int, SkipReason], algorithm: Algorithm, means: RunningMeans, failure: str
) -> Prepared:
    """Return a batch from which nothing is trained, because a user's own function failed on it."""
    reasons = {**dict.fromkeys(range(len(whole.trajectories)), SkipReason.USER_FUNCTION_FAILED), **dropped}
    return Prepared(
        batch=whole.only([]),
        judged=judge(whole.only([]), algorithm),
        dropped=tuple((whole.trajectories[index], reason) for index, reason in reasons.items()),
        advantages=assign([], [], algorithm, means),
        failure=failure,
    )
