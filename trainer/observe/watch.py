"""Faults that show only over several batches: gradients that cannot be learnt from, for which the run is paused, and
traffic that does not suit the baseline, for which there is a warning."""

from __future__ import annotations

import structlog

from trainer.algorithm.advantages import Advantages
from trainer.claims.leased import LeasedClaims
from trainer.config import Baseline
from trainer.parallel.mesh import Ranks
from trainer.update import Outcome

# Characters of a failure in the reason of a pause: the proxy accepts 2,000 for the whole reason.
_LONGEST_FAILURE = 1500

_log = structlog.get_logger("trainer")

# Batches in a row without any group before the warning, since one small batch may have none by chance.
_ENOUGH_BATCHES = 3


class GradientWatch:
    """Counts batches in a row that could not be learnt from, and pauses the run after `pause_after` of them.

    A single one is skipped. Several mean that the weights, the data or a user's own function are at fault, and
    further batches would be wasted. All ranks count alike. The pause is in the proxy's store, so it outlives this
    process.
    """

    def __init__(self, ranks: Ranks, claims: LeasedClaims, pause_after: int) -> None:
        self._ranks = ranks
        self._claims = claims
        self._pause_after = pause_after
        self._in_a_row = 0

    def learnt(self) -> None:
        """Begin to count anew after a batch that was learnt from."""
        self._in_a_row = 0

    def not_tried(self, version: int, failure: str | None) -> None:
        """Count a batch that was not tried because a filter or an advantage of the user's own failed on it. A batch
        without a `failure` had no signal; it says nothing about gradients and is not counted."""
        if failure is not None:
            self._function_failed(version, failure)

    def not_stepped(self, version: int, outcome: Outcome) -> None:
        """Count a batch whose gradient at the weights of `version` was not finite or beyond its bound, or on which
        the user's own loss failed."""
        if outcome.failure is not None:
            self._function_failed(version, outcome.failure)
            return
        self._count(
            f"had no gradient to learn from at version {version} (norm of the last: {outcome.gradient_norm:g})."
            " See what they were rewarded with; lower trainer.optimizer.learning_rate; then resume the run"
        )

    def _function_failed(self, version: int, failure: str) -> None:
        _log.error("a function of the configuration failed: the batch is skipped", reason=failure)
        self._count(
            f"were not learnt from at version {version}: a function of the configuration failed"
            f" ({failure[:_LONGEST_FAILURE]}). Correct it, restart the trainer, then resume the run"
        )

    def _count(self, what: str) -> None:
        self._in_a_row += 1
        if self._in_a_row < self._pause_after:
            return
        reason = f"{self._in_a_row} batches in a row {what}. A trainer that is restarted tries the same batches again"
        self._in_a_row = 0
        _log.error("pausing the run", reason=reason)
        self._ranks.from_first(lambda: self._claims.pause_run(reason))


class GroupWatch:
    """Warns of a group baseline on traffic that has neither groups nor tasks.

    This is not known at the start, because agents decide how they name their sessions.
    """

    def __init__(self, baseline: Baseline) -> None:
        self._baseline = baseline
        self._watches = baseline in (Baseline.GROUP_MEAN, Baseline.LEAVE_ONE_OUT)
        self._in_a_row = 0

    def compared(self, advantages: Advantages) -> None:
        """Count a batch. Warn after the third in a row without groups, and again only after a batch had groups or
        tasks."""
        fallbacks = advantages.fallbacks
        if not self._watches or not fallbacks.rewarded:
            return
        if fallbacks.without_task < fallbacks.rewarded:
            self._in_a_row = 0
            return
        self._in_a_row += 1
        if self._in_a_row == _ENOUGH_BATCHES:
            _log.warning(
                f"baseline {self._baseline.value} compares the sessions of a group, and none of the last"
                f" {_ENOUGH_BATCHES} batches has a group of two: each session meets the mean of the whole run"
                " instead, whatever its task. Attempt each task several times in one group (X-Base-RL-Group), or"
                " name tasks (`task` of POST /v1/sessions); with neither, set trainer.algorithm.baseline ="
                " running_mean and scale = running_std to say that this is meant",
                trajectories=fallbacks.rewarded,
            )
