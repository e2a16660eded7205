"""From a claim to what the learner takes: which trajectories are trained, their advantages, their micro-batches.

Pure, and all that decides what a step learns from: replaying a step goes the same way.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from proxy.contract.claim import ClaimedBatch
from proxy.contract.trajectory import Trajectory
from trainer.algorithm.advantages import Advantages, RunningMeans, assign
from trainer.algorithm.parts import Algorithm
from trainer.config import BatchSettings, Packing
from trainer.intake.grouping import Batch, flatten
from trainer.intake.packing import MiniBatch, mini_batches
from trainer.intake.sequences import linearise
from trainer.intake.staleness import Skip, drop_unusable


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """`batch` is what can be trained, `dropped` what cannot and why; `advantages` belong to the batch and hold the
    running means after it."""

    batch: Batch
    dropped: tuple[tuple[Trajectory, Skip], ...]
    advantages: Advantages

    def packed(
        self, settings: BatchSettings, algorithm: Algorithm, packings: Collection[Packing] = tuple(Packing)
    ) -> list[MiniBatch]:
        """`packings` are those that the model takes."""
        sequences, chosen = linearise(self.batch.trajectories), settings.taken_by(packings)
        return mini_batches(self.batch, self.advantages.turns, sequences, chosen, algorithm)


def prepare(
    claimed: ClaimedBatch,
    version: int,
    settings: BatchSettings,
    algorithm: Algorithm,
    means: RunningMeans,
    vocabulary: int,
) -> Prepared:
    """A claim as it is trained from `version`, by a model of so many token ids, after batches of these `means`."""
    whole = flatten(claimed.groups, version)
    batch, dropped = drop_unusable(whole, settings.max_staleness, vocabulary)
    return Prepared(
        batch=batch,
        dropped=tuple((whole.trajectories[index], reason) for index, reason in dropped.items()),
        advantages=assign(batch.trajectories, batch.groups, algorithm, means),
    )
