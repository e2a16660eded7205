"""claim → drop what cannot be trained → baselines, advantages → pack → update → publish → commit.

What waits for what:
- `take` waits at the proxy for enough rewarded trajectories; a session's end or reward there wakes it. All the while
  the leases of what was claimed are renewed by `LeaseKeeper`'s thread.
- every request waits for a proxy that is down; the proxy's return wakes it.
- ranks other than the first wait in `from_first` for what the first one got. Serving never waits for the trainer.

Between claim and commit nothing is true yet: whatever ends the process there, the weights written are garbage and the
leases expire. So the loop may be interrupted anywhere.
"""

from __future__ import annotations

from collections.abc import Sequence

import structlog
import torch

from proxy.contract.claim import TrajectoryAudit
from proxy.contract.identifiers import ClaimId
from trainer.algorithm.presets import Algorithm
from trainer.claims import ClaimsInHand
from trainer.config import BatchSettings
from trainer.errors import Superseded
from trainer.intake.preparation import prepare
from trainer.intake.staleness import Skip
from trainer.parallel.mesh import Ranks
from trainer.report import PhaseClock, audit_all_skipped, audit_skipped, audit_trained, consumption, step_metrics
from trainer.token_audit import audit_tokens
from trainer.update import Learner
from trainer.versions import Versions

_log = structlog.get_logger("trainer")


class TrainingLoop:
    """Every rank runs the same loop; what only the first may do is inside `from_first`. Of `sample` trajectories of
    each step, every token is kept."""

    def __init__(
        self,
        settings: BatchSettings,
        algorithm: Algorithm,
        ranks: Ranks,
        claims: ClaimsInHand,
        versions: Versions,
        learner: Learner,
        *,
        sample: int,
    ) -> None:
        self._settings = settings
        self._algorithm = algorithm
        self._ranks = ranks
        self._claims = claims
        self._versions = versions
        self._learner = learner
        self._sample = sample

    def run(self) -> None:
        """Trains until interrupted."""
        self.resume()
        while True:
            self.step()

    def resume(self) -> None:
        self.head, self.means = self._versions.resume()

    def step(self) -> None:
        """Makes a version of the next batch; starts again from the head where that was in vain."""
        try:
            self._step()
        except Superseded as superseded:
            _log.warning("starting again from the head", reason=str(superseded))
            self.resume()

    def _step(self) -> None:
        clock = PhaseClock()
        claimed = self._ranks.from_first(lambda: self._claims.take(self.head.version))
        clock.lap("claim")
        if claimed is None or claimed.claim_id is None:
            return

        prepared = prepare(
            claimed, self.head.version, self._settings, self._algorithm, self.means, self._learner.model.vocabulary
        )
        batch, advantages = prepared.batch, prepared.advantages
        audits = [audit_skipped(trajectory, reason) for trajectory, reason in prepared.dropped]
        self.means = advantages.means
        if advantages.all_zero:
            self._keep(claimed.claim_id, [*audits, *audit_all_skipped(batch, Skip.NO_SIGNAL)])
            return

        mini_batches = prepared.packed(self._settings, self._algorithm)
        clock.lap("prepare")
        torch.manual_seed(self._versions.seed(self.head) + self._ranks.rank)
        outcome = self._learner.update(mini_batches)
        clock.lap("update")
        if not outcome.stepped:
            self._keep(claimed.claim_id, [*audits, *audit_all_skipped(batch, Skip.NON_FINITE_GRADIENT)])
            return

        audits += audit_trained(batch, advantages, outcome.tokens)
        metrics = step_metrics(batch, advantages, outcome, audits, clock.seconds)
        tokens = audit_tokens(batch, outcome.tokens, self._sample)
        self.head = self._versions.make(self.head, self.means, claimed.claim_id, audits, metrics, tokens)
        clock.lap("publish_and_commit")
        self._report(metrics, clock)

    def _keep(self, claim_id: ClaimId, audits: Sequence[TrajectoryAudit]) -> None:
        """The batch taught nothing: its claim waits for the next version, which is made at once if many wait."""
        counts = {name: int(count) for name, count in consumption(audits).items() if count}
        _log.info("batch without effect, kept for the next version", claim=claim_id, **counts)
        if self._ranks.from_first(lambda: self._claims.keep(claim_id, audits)):
            self.head = self._versions.make(self.head, self.means, None, (), {}, ())

    def _report(self, metrics: dict[str, float], clock: PhaseClock) -> None:
        if self._ranks.is_first:
            names = ("reward_mean", "staleness_mean", "tokens", "gradient_norm", "entropy", "logprob_gap_mean")
            figures = {name: round(metrics[name], 4) for name in names}
            seconds = {f"{phase}_s": round(value, 3) for phase, value in clock.seconds.items()}
            _log.info("step", version=self.head.version, **figures, **seconds)
