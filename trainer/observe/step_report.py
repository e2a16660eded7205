"""The report of a step: metrics and audits for the commit, warnings, and the instruments that follow the loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import structlog

from proxy.contract.claim import ClaimedBatch, SkipReason, TrajectoryAudit
from proxy.contract.step import TokenAudit
from trainer.algorithm.parts import Algorithm
from trainer.batching.packing import MiniBatch
from trainer.batching.preparation import Prepared
from trainer.batching.teaching import Taught
from trainer.claims.leased import LeasedClaims
from trainer.config import TrainerSettings
from trainer.observe.audits import audit_all_skipped, audit_trained, audit_untrained, why_skipped
from trainer.observe.instruments import Instruments
from trainer.observe.mismatch import GapWatch, warn_of_cut_sampling
from trainer.observe.step_metrics import divergence_from_teacher, hindsight_metrics, signal_metrics, step_metrics
from trainer.observe.token_audit import audit_tokens
from trainer.observe.watch import GroupWatch
from trainer.parallel.mesh import Ranks
from trainer.runtime.memory import MicroBatchMemory
from trainer.update import Outcome

_log = structlog.get_logger("trainer")


class StepReport(NamedTuple):
    """The figures that are committed with a trained batch."""

    audits: list[TrajectoryAudit]
    metrics: dict[str, float]
    tokens: tuple[TokenAudit, ...]


class StepReporter:
    """Reports the steps of one run. Every rank has one and calls the same methods."""

    def __init__(
        self,
        settings: TrainerSettings,
        algorithm: Algorithm,
        ranks: Ranks,
        claims: LeasedClaims,
        memory: MicroBatchMemory,
        instruments: Instruments,
    ) -> None:
        self.clock = instruments.clock
        self._claims = claims
        self._memory = memory
        self._instruments = instruments
        self._sample = settings.audit.sample
        self._groups = GroupWatch(algorithm.baseline)
        self._gap = GapWatch(ranks, claims, settings.mismatch)

    def between_steps(self, version: int) -> None:
        """Note that no phase is under way and that `version` is the head."""
        self._instruments.between_steps(version)

    def prepared(self, prepared: Prepared) -> None:
        """Warn if the batch has no groups to compare, or answers that are not trained."""
        self._groups.compared(prepared.advantages)
        warn_of_cut_sampling(prepared.judged)

    def without_signal(self, prepared: Prepared) -> list[TrajectoryAudit]:
        """Return the audits of a batch that has no signal. Warn if its rewards were made equal, because more sampling
        would not change that."""
        if prepared.levelled:
            _log.warning(
                "rewards differed and nothing is learnt: their bounds or the overlong penalty made them equal; widen"
                " algorithm.reward.low and high, raise overlong_tokens, or lower overlong_factor",
                groups=prepared.levelled,
            )
        return _all_skipped(prepared, SkipReason.NO_SIGNAL)

    def not_stepped(self, prepared: Prepared, outcome: Outcome) -> list[TrajectoryAudit]:
        """Return the audits of a batch whose update took no step."""
        return _all_skipped(prepared, why_skipped(outcome))

    def trained(
        self,
        claimed: ClaimedBatch,
        prepared: Prepared,
        mini_batches: Sequence[MiniBatch],
        outcome: Outcome,
        taught: Taught | None,
    ) -> StepReport:
        """Return the figures of a batch that was learnt from."""
        if outcome.failure is not None:
            _log.warning("a mini-batch was skipped: the loss failed", reason=outcome.failure)
        batch, advantages = prepared.batch, prepared.advantages
        trained = audit_trained(batch, advantages, outcome.tokens)
        audits = prepared.explained([*audit_untrained(prepared), *trained])
        extra_claims = 0 if claimed.claim_id is None else len(self._claims.joined_to(claimed.claim_id))
        seconds = self.clock.take()
        metrics = step_metrics(batch, advantages, mini_batches, outcome, audits, seconds)
        metrics |= prepared.judged.metrics()
        metrics |= divergence_from_teacher(outcome, taught)
        metrics |= hindsight_metrics(outcome)
        metrics |= signal_metrics(prepared, extra_claims=extra_claims)
        metrics |= self._instruments.utilisation(mini_batches, seconds, claimed.engine)
        metrics["oom_splits"] = float(self._memory.take_splits())
        metrics |= self._gap.metrics(metrics.get("logprob_gap_fresh"))
        return StepReport(audits, metrics, audit_tokens(batch, outcome.tokens, self._sample))

    def committed(self, version: int, report: StepReport, metrics: Mapping[str, float]) -> None:
        """Log the committed `version` with all of its `metrics`. Pause the run if engine and trainer disagree. A
        collective."""
        self._instruments.made(version, metrics)
        self._gap.stepped(version, report.metrics.get("logprob_gap_fresh"))


def _all_skipped(prepared: Prepared, reason: SkipReason) -> list[TrajectoryAudit]:
    return prepared.explained([*audit_untrained(prepared), *audit_all_skipped(prepared.batch, reason)])
