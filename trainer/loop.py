"""claim → drop what cannot be trained → baselines, advantages → pack → update → publish → commit.

What waits for what:
- `take` waits at the proxy for enough rewarded trajectories; a session's end or reward wakes it. It also waits while
  the run is paused, by an operator or by this loop; resuming the run wakes it. Meanwhile the thread of `LeaseKeeper`
  renews the leases of all claims.
- every request waits for a proxy that is down; the proxy's return wakes it.
- publishing runs behind the next step on a thread of its own where the settings allow it. `versions.make` waits for
  the version before; the next batch may be claimed while that one is committed.
- ranks other than the first wait in `from_first` for the first rank's result. Serving never waits for the trainer.

Nothing takes effect between claim and commit: if the process dies there, the leases expire, and the weights that were
written are garbage. So the loop may be interrupted anywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import structlog
import torch

from proxy.contract.claim import ClaimedBatch, TrajectoryAudit
from proxy.contract.identifiers import ClaimId
from proxy.contract.policy import Head
from trainer.algorithm.parts import Algorithm
from trainer.algorithm.running import RunningMeans
from trainer.batching.packing import MiniBatch
from trainer.batching.preparation import Prepared
from trainer.batching.sequences import linearise
from trainer.batching.teaching import Taught
from trainer.claims.leased import LeasedClaims
from trainer.errors import Superseded
from trainer.observe.step_metrics import consumption
from trainer.observe.step_report import StepReporter
from trainer.observe.watch import GradientWatch
from trainer.parallel.mesh import Ranks
from trainer.runtime.memory import MicroBatchMemory
from trainer.teacher import Teacher
from trainer.update import Learner, Outcome
from trainer.versions import Versions

_log = structlog.get_logger("trainer")


@dataclass(kw_only=True)
class TrainingLoop:
    """Trains one run. Every rank runs the same loop; actions of the first rank alone are inside `from_first`.

    `take` returns the next batch, claimed now or fetched ahead, or None. `prepare` makes a batch ready for the
    learner.
    """

    algorithm: Algorithm
    ranks: Ranks
    take: Callable[[int, RunningMeans], ClaimedBatch | None]
    prepare: Callable[[ClaimedBatch, int, RunningMeans], Prepared]
    claims: LeasedClaims
    learner: Learner
    teacher: Teacher | None
    versions: Versions
    memory: MicroBatchMemory
    reporter: StepReporter
    gradients: GradientWatch
    head: Head = field(init=False)
    means: RunningMeans = field(init=False)

    def run(self) -> None:
        """Train until interrupted."""
        self.resume()
        while True:
            self.step()

    def resume(self) -> None:
        """Load the run's head."""
        self.reporter.clock.begin("resume")
        self.head, self.means = self.versions.resume()

    def step(self) -> None:
        """Make a version of the next batch. Start again from the head if the proxy refuses the version."""
        try:
            self._step()
        except Superseded as superseded:
            _log.warning("starting again from the head", reason=str(superseded))
            self.resume()

    def _step(self) -> None:
        clock, reporter = self.reporter.clock, self.reporter
        self.head = self.versions.settled(self.head)
        reporter.between_steps(self.head.version)
        clock.begin("claim")
        claimed = self.ranks.from_first(lambda: self.take(self.head.version, self.means))
        # Before the batch is trained: if the version behind was refused, the step would be in vain.
        self.head = self.versions.settled(self.head)
        if claimed is None or claimed.claim_id is None:
            return
        clock.begin("prepare")
        prepared = self._prepare(claimed)
        self.means = prepared.advantages.means
        reporter.prepared(prepared)
        if not self._has_signal(prepared):
            self._keep(claimed.claim_id, reporter.without_signal(prepared))
            self.gradients.not_tried(self.head.version, prepared.failure)
            return
        mini_batches = prepared.packed(self.memory.settings, self.algorithm, self.learner.packings)
        taught = self._ask_teacher(prepared)
        clock.begin("update")
        outcome = self._update(prepared, mini_batches, taught)
        if not outcome.stepped:
            self._keep(claimed.claim_id, reporter.not_stepped(prepared, outcome))
            self.gradients.not_stepped(self.head.version, outcome)
            return
        self.gradients.learnt()
        clock.begin("publish_and_commit")
        report = reporter.trained(claimed, prepared, mini_batches, outcome, taught)
        self.head = self.versions.make(
            self.head,
            self.means,
            claimed.claim_id,
            *report,
            committed=lambda version, metrics: reporter.committed(version, report, metrics),
        )

    def _prepare(self, claimed: ClaimedBatch) -> Prepared:
        def prepared() -> Prepared:
            return self.prepare(claimed, self.head.version, self.means)

        # The user's own functions could return another result on each rank, and all must learn from one batch.
        return self.ranks.from_first(prepared) if self.algorithm.user_functions else prepared()

    def _has_signal(self, prepared: Prepared) -> bool:
        trained = bool(prepared.batch.trajectories)
        if self.algorithm.learns_from_words:
            return trained and prepared.has_signal
        return trained and (not prepared.advantages.all_zero or self.algorithm.has_teacher)

    def _ask_teacher(self, prepared: Prepared) -> Taught | None:
        """Return the teacher's log-probabilities of the batch; None without a teacher. Waits for one that is down."""
        teacher, trajectories = self.teacher, prepared.batch.trajectories
        if teacher is None:
            return None
        return self.ranks.from_first(lambda: teacher.scores(trajectories, linearise(trajectories)))

    def _update(self, prepared: Prepared, mini_batches: Sequence[MiniBatch], taught: Taught | None) -> Outcome:
        """Train on the batch. Raises StepTooLarge, RanksStartAgain, MemoryExhausted."""
        # Seeded for each step, so that a replay of the step draws the same dropout.
        torch.manual_seed(self.versions.seed(self.head) + self.ranks.rank)
        try:
            hinted = prepared.hinted(self.memory.settings, self.algorithm, self.learner.packings)
            return self.learner.update(mini_batches, taught, hinted)
        except torch.OutOfMemoryError as error:
            said = str(error).partition("\n")[0]
        # Outside the handler: the exception's frames would keep the step's tensors in memory.
        sequences = linearise(prepared.batch.trajectories)
        raise self.memory.after_refusal(mini_batches, sequences, self.head.version, said)

    def _keep(self, claim_id: ClaimId, audits: Sequence[TrajectoryAudit]) -> None:
        """Keep the claims of a batch that taught nothing for the next version. Make that version at once, of
        unchanged weights, if many claims wait."""
        counts = {name: int(count) for name, count in consumption(audits).items() if count}
        _log.info("batch without effect, kept for the next version", claim=claim_id, **counts)
        if self.ranks.from_first(lambda: self.claims.keep(claim_id, audits)):
            self.head = self.versions.make(self.head, self.means, None, (), {}, ())
