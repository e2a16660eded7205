"""From a claim to what the learner takes: which trajectories are trained, their advantages, their micro-batches.

These functions are pure, and they decide all that a step learns from, so that a replayed step learns from the same.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from proxy.contract.claim import ClaimedBatch
from proxy.contract.trajectory import Trajectory
from trainer.algorithm.advantages import Advantages, RunningMeans, assign
from trainer.algorithm.parts import Algorithm
from trainer.algorithm.signal import levelled_groups, with_signal
from trainer.config import BatchSettings, Packing
from trainer.intake.grouping import Batch, flatten
from trainer.intake.packing import MiniBatch, mini_batches
from trainer.intake.sequences import linearise
from trainer.intake.staleness import Skip, drop_unusable


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """`batch` is what is trained, `dropped` what cannot be and why. `left_out` could be trained, and has no signal:
    the algorithm has the part `fill`. `advantages` belong to the batch and hold the running means after it, which
    have seen `left_out` too. `levelled` counts the groups whose rewards differed until the reward's bounds or the
    overlong penalty made them equal."""

    batch: Batch
    dropped: tuple[tuple[Trajectory, Skip], ...]
    advantages: Advantages
    left_out: tuple[Trajectory, ...] = ()
    levelled: int = 0

    def packed(
        self, settings: BatchSettings, algorithm: Algorithm, packings: Collection[Packing] = tuple(Packing)
    ) -> list[MiniBatch]:
        """Return the micro-batches by optimiser step. `packings` are those that the model takes."""
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
    """Return a claim as it is trained from `version`, after batches of these `means`. `vocabulary` is the model's
    number of token ids."""
    whole = flatten(claimed.groups, version)
    usable, dropped = drop_unusable(whole, settings.max_staleness, vocabulary)
    advantages = assign(usable.trajectories, usable.groups, algorithm, means)
    trained = with_signal(usable.groups, advantages.turns) if algorithm.fill else range(len(usable.groups))
    rest = set(range(len(usable.groups))).difference(trained)
    return Prepared(
        batch=usable.only(trained),
        dropped=tuple((whole.trajectories[index], reason) for index, reason in dropped.items()),
        advantages=advantages.only(trained),
        left_out=tuple(usable.trajectories[index] for index in sorted(rest)),
        levelled=levelled_groups(usable.trajectories, usable.groups, algorithm),
    )
