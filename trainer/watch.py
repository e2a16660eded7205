"""What a training run is paused for without an operator: batch after batch that teaches nothing it should."""

from __future__ import annotations

import structlog

from trainer.claims import ClaimsInHand
from trainer.parallel.mesh import Ranks

_log = structlog.get_logger("trainer")


class GradientWatch:
    """Counts batches in a row whose gradient was not finite, or beyond its bound. One alone is skipped; after
    `pause_after` the weights, or what they are fed with, are ill, and more of it would not help.

    Every rank counts the same. The pause itself is in the proxy's store, where it outlives this process.
    """

    def __init__(self, ranks: Ranks, claims: ClaimsInHand, pause_after: int) -> None:
        self._ranks = ranks
        self._claims = claims
        self._pause_after = pause_after
        self._in_a_row = 0

    def learnt(self) -> None:
        self._in_a_row = 0

    def learnt_nothing(self, version: int, norm: float) -> None:
        """Pauses the run if it is time. `norm` is the gradient's, at the weights of `version`."""
        self._in_a_row += 1
        if self._in_a_row < self._pause_after:
            return
        reason = (
            f"{self._in_a_row} batches in a row had no gradient to learn from at version {version} (norm of the last:"
            f" {norm:g}). See what they were rewarded with; lower trainer.optimizer.learning_rate; then"
            " resume the run. A trainer that is restarted tries the same batches again"
        )
        self._in_a_row = 0
        _log.error("pausing the run", reason=reason)
        self._ranks.from_first(lambda: self._claims.pause_run(reason))
