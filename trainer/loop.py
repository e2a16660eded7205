"""claim → drop what cannot be trained → baselines, advantages → pack → update → publish → commit.

What waits for what:
- `take` waits at the proxy for enough rewarded trajectories; a session's end or reward there wakes it. All the while
  the leases of what was claimed are renewed by `LeaseKeeper`'s thread.
- `take` waits as well while the run is paused, by an operator or by this loop; resuming it wakes it.
- every request waits for a proxy that is down; the proxy's return wakes it.
- ranks other than the first wait in `from_first` for what the first one got. Serving never waits for the trainer.

Between claim and commit nothing is true yet: whatever ends the process there, the weights written are garbage and the
leases expire. So the loop may be interrupted anywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import structlog
import torch

from proxy.contract.claim import ClaimedBatch, TrajectoryAudit
from proxy.contract.identifiers import ClaimId
from trainer.algorithm.parts import Algorithm
from trainer.algorithm.running import RunningMeans
from trainer.batching.grouping import Batch
from trainer.batching.packing import MiniBatch
from trainer.batching.preparation import Prepared, prepare
from trainer.batching.sequences import linearise
from trainer.batching.staleness import Skip
from trainer.batching.teaching import Taught
from trainer.claims.leased import LeasedClaims
from trainer.config import BatchSettings, MismatchSettings
from trainer.errors import Superseded
from trainer.observe.instruments import Instruments
from trainer.observe.mismatch import GapWatch, warn_of_cut_sampling
from trainer.observe.report import (
    audit_all_skipped,
    audit_trained,
    audit_untrained,
    consumption,
    divergence_from_teacher,
    signal_metrics,
    step_metrics,
    why_skipped,
)
from trainer.observe.token_audit import audit_tokens
from trainer.observe.watch import GradientWatch, GroupWatch
from trainer.parallel.mesh import Ranks
from trainer.runtime.memory import MicroBatchMemory
from trainer.teacher import Teacher
from trainer.update import Learner, Outcome
from trainer.versions import Versions

_log = structlog.get_logger("trainer")


class TrainingLoop:
    """Every rank runs the same loop; what only the first may do is inside `from_first`. Of `sample` trajectories of
    each step, every token is kept. Every rank has the `teacher`, and the first one asks it. After `pause_after`
    batches in a row without a gradient to learn from, the run is paused. `take` is how it gets a batch: by claiming
    one, or by what was claimed ahead."""

    def __init__(
        self,
        settings: BatchSettings,
        algorithm: Algorithm,
        ranks: Ranks,
        claims: LeasedClaims,
        versions: Versions,
        learner: Learner,
        *,
        instruments: Instruments,
        sample: int,
        pause_after: int,
        mismatch: MismatchSettings | None = None,
        teacher: Teacher | None = None,
        memory: MicroBatchMemory | None = None,
        take: Callable[[int, RunningMeans], ClaimedBatch | None],
    ) -> None:
        self._settings = settings
        self._memory = memory or MicroBatchMemory(settings, ranks)
        self._algorithm = algorithm
        self._ranks = ranks
        self._claims = claims
        self._take = take
        self._versions = versions
        self._learner = learner
        self._instruments = instruments
        self._clock = instruments.clock
        self._sample = sample
        self._teacher = teacher
        self._watch = GradientWatch(ranks, claims, pause_after)
        self._groups = GroupWatch(algorithm.baseline)
        self._gap = GapWatch(ranks, claims, mismatch or MismatchSettings())

    def run(self) -> None:
        """Trains until interrupted."""
        self.resume()
        while True:
            self.step()

    def resume(self) -> None:
        self._clock.begin("resume")
        self.head, self.means = self._versions.resume()

    def step(self) -> None:
        """Makes a version of the next batch; starts again from the head where that was in vain."""
        try:
            self._step()
        except Superseded as superseded:
            _log.warning("starting again from the head", reason=str(superseded))
            self.resume()

    def _step(self) -> None:
        self._instruments.between_steps(self.head.version)
        self._clock.begin("claim")
        claimed = self._ranks.from_first(lambda: self._take(self.head.version, self.means))
        if claimed is None or claimed.claim_id is None:
            return

        self._clock.begin("prepare")
        prepared = self._prepared(claimed)
        batch, advantages = prepared.batch, prepared.advantages
        audits = audit_untrained(prepared)
        self.means = advantages.means
        self._groups.compared(advantages)
        warn_of_cut_sampling(prepared.judged)
        if not batch.trajectories or (advantages.all_zero and not self._algorithm.has_teacher):
            self._warn_of_levelled(prepared)
            skipped = prepared.explained([*audits, *audit_all_skipped(batch, Skip.NO_SIGNAL)])
            self._keep(claimed.claim_id, skipped)
            if prepared.failure is not None:
                self._watch.function_failed(self.head.version, prepared.failure)
            return

        mini_batches = prepared.packed(self._memory.settings, self._algorithm, self._learner.packings)
        taught = self._ask_teacher(batch)
        self._clock.begin("update")
        torch.manual_seed(self._versions.seed(self.head) + self._ranks.rank)
        outcome = self._updated(prepared, mini_batches, taught)
        if not outcome.stepped:
            self._keep(
                claimed.claim_id, prepared.explained([*audits, *audit_all_skipped(batch, why_skipped(outcome))])
            )
            if outcome.failure is not None:
                self._watch.function_failed(self.head.version, outcome.failure)
            else:
                self._watch.learnt_nothing(self.head.version, outcome.gradient_norm)
            return

        self._watch.learnt()
        if outcome.failure is not None:
            _log.warning("a mini-batch was skipped: the loss failed", reason=outcome.failure)
        self._clock.begin("publish_and_commit")
        audits = prepared.explained([*audits, *audit_trained(batch, advantages, outcome.tokens)])
        seconds = self._clock.take()
        metrics = step_metrics(batch, advantages, mini_batches, outcome, audits, seconds)
        metrics |= prepared.judged.metrics()
        metrics |= divergence_from_teacher(outcome, taught)
        metrics |= signal_metrics(prepared, extra_claims=len(self._claims.joined_to(claimed.claim_id)))
        metrics |= self._instruments.utilisation(mini_batches, seconds, claimed.engine)
        metrics["oom_splits"] = float(self._memory.take_splits())
        gap = metrics.get("logprob_gap_fresh")
        metrics |= self._gap.metrics(gap)
        tokens = audit_tokens(batch, outcome.tokens, self._sample)
        self.head = self._versions.make(self.head, self.means, claimed.claim_id, audits, metrics, tokens)
        self._instruments.made(self.head.version, self._versions.told)
        self._gap.stepped(self.head.version, gap)

    def _prepared(self, claimed: ClaimedBatch) -> Prepared:
        def prepared() -> Prepared:
            vocabulary = self._learner.model.vocabulary
            return prepare(claimed, self.head.version, self._settings, self._algorithm, self.means, vocabulary)

        # All ranks must learn from one batch, which functions of the user's own might make a different one on each.
        return self._ranks.from_first(prepared) if self._algorithm.user_functions else prepared()

    def _updated(self, prepared: Prepared, mini_batches: Sequence[MiniBatch], taught: Taught | None) -> Outcome:
        """Raises StepTooLarge, RanksStartAgain, MemoryExhausted."""
        try:
            return self._learner.update(mini_batches, taught)
        except torch.OutOfMemoryError as error:
            said = str(error).partition("\n")[0]
        # Outside of the handler, which would hold on to what the frames hold.
        sequences = linearise(prepared.batch.trajectories)
        raise self._memory.refused(mini_batches, sequences, self.head.version, said)

    def _ask_teacher(self, batch: Batch) -> Taught | None:
        """What it gives to the batch's tokens; None where there is none. Waits for one that is down."""
        teacher = self._teacher
        if teacher is None:
            return None
        return self._ranks.from_first(lambda: teacher.scores(batch.trajectories, linearise(batch.trajectories)))

    def _warn_of_levelled(self, prepared: Prepared) -> None:
        """Say that the batch has no signal because its rewards were made equal, which more sampling does not cure."""
        if prepared.levelled:
            _log.warning(
                "rewards differed and nothing is learnt: their bounds or the overlong penalty made them equal; widen"
                " algorithm.reward.low and high, raise overlong_tokens, or lower overlong_factor",
                groups=prepared.levelled,
            )

    def _keep(self, claim_id: ClaimId, audits: Sequence[TrajectoryAudit]) -> None:
        """The batch taught nothing: its claim waits for the next version, which is made at once if many wait."""
        counts = {name: int(count) for name, count in consumption(audits).items() if count}
        _log.info("batch without effect, kept for the next version", claim=claim_id, **counts)
        if self._ranks.from_first(lambda: self._claims.keep(claim_id, audits)):
            self.head = self._versions.make(self.head, self.means, None, (), {}, ())
