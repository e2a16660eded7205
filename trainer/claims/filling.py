"""The trainer's source of batches: one claim, filled up by further claims if some of its groups have no signal.

With the algorithm's part `fill` (dynamic sampling, Yu et al. 2025: DAPO), groups without signal are left out of the
batch (`batching/preparation.py`), and more trajectories are claimed until `trajectories` of them have a signal.

What waits for what: each further claim waits at the proxy like the first one, all of them together until
`wait_seconds` after the batch was asked for. Trajectories that arrive later belong to the next batch.
"""

from __future__ import annotations

import time
from typing import NamedTuple

import structlog

from proxy.contract.claim import ClaimedBatch
from trainer.algorithm.parts import Algorithm
from trainer.algorithm.running import RunningMeans
from trainer.batching.preparation import Prepared, prepare
from trainer.claims.leased import LeasedClaims
from trainer.config import BatchSettings
from trainer.errors import ProxySilent

_log = structlog.get_logger("trainer.filling")


class _Preparation(NamedTuple):
    """A prepared batch, with the arguments that it was prepared from."""

    batch: ClaimedBatch
    version: int
    means: RunningMeans
    prepared: Prepared


class BatchSource:
    """Claims batches and prepares them for the learner.

    Every rank has one, and only the first claims. `vocabulary` is the model's number of token ids. `max_new_tokens`
    is the run's bound on one answer when the algorithm was resolved; None: unknown.
    """

    def __init__(
        self,
        claims: LeasedClaims,
        settings: BatchSettings,
        algorithm: Algorithm,
        vocabulary: int,
        max_new_tokens: int | None = None,
    ) -> None:
        self._claims = claims
        self._settings = settings
        self._algorithm = algorithm
        self._vocabulary = vocabulary
        self._max_new_tokens = max_new_tokens
        self._last: _Preparation | None = None

    def prepare(self, batch: ClaimedBatch, version: int, means: RunningMeans) -> Prepared:
        """Prepare a batch for a step from `version`; `means` are the running means before it. The preparation that
        counted the signal of the batch is used again, because large batches take seconds."""
        last, self._last = self._last, None
        # By identity: these objects are immutable, and comparing whole batches would take as long as preparing them.
        if last is not None and last.batch is batch and last.version == version and last.means is means:
            return last.prepared
        return prepare(batch, version, self._settings, self._algorithm, means, self._vocabulary)

    def take(self, version: int, means: RunningMeans, *, waits: bool = True) -> ClaimedBatch | None:
        """Return the next batch to train from `version`, with the running means before it. Return None if there was
        too little within the waiting time, or, without `waits`, if there is no whole batch at once. Raises the errors
        of `LeasedClaims.take`."""
        deadline = time.monotonic() + self._settings.wait_seconds
        batch = self._claims.take(version, waits=waits)
        if batch is not None:
            self._warn_of_new_bound(batch)
        if batch is None or not self._algorithm.fill:
            return batch
        return self._filled(batch, version, means, deadline)

    def _warn_of_new_bound(self, batch: ClaimedBatch) -> None:
        """Warn once if the run's bound on answers is no longer the one that the overlong penalty was resolved for.
        The penalty is part of the record of every step, so it does not change while the trainer runs."""
        bound = batch.max_new_tokens
        if bound is None or bound == self._max_new_tokens or not self._algorithm.overlong_factor:
            return
        self._max_new_tokens = bound
        _log.warning(
            "run.max_new_tokens has changed, and overlong answers are penalised as before: start the trainer again",
            max_new_tokens=bound,
            overlong_tokens=self._algorithm.overlong_tokens,
        )

    def _filled(self, batch: ClaimedBatch, version: int, means: RunningMeans, deadline: float) -> ClaimedBatch:
        """Join claims to the batch until it has enough trajectories with signal, no more are waiting, or the number
        of held claims is at its bound. Each claim asks only for the missing trajectories, so a batch never has more
        signal than wanted, except to keep a group whole."""
        wanted, extra = self._settings.trajectories, 0
        while (missing := wanted - self._with_signal(batch, version, means)) > 0:
            # Bounded by claims, not only by time: traffic without any signal would be claimed for ever.
            if self._claims.room_for_more(batch) < 1:
                break
            try:
                more = self._claims.take_more(batch, missing, max(0.0, deadline - time.monotonic()))
            except ProxySilent:  # the batch is still held, and can be trained as it is
                break
            if more is None:
                break
            batch, extra = more, extra + 1
        if extra or missing > 0:
            _log.info(
                "batch filled up",
                claim=batch.claim_id,
                extra_claims=extra,
                trajectories=batch.trajectory_count,
                with_signal=wanted - missing,
                wanted=wanted,
            )
        return batch

    def _with_signal(self, batch: ClaimedBatch, version: int, means: RunningMeans) -> int:
        """Return how many trajectories of the batch would be trained. A batch on which a user's own function fails
        counts as full: the function would fail on a larger one too, and each further claim would be wasted."""
        prepared = prepare(batch, version, self._settings, self._algorithm, means, self._vocabulary)
        self._last = _Preparation(batch, version, means, prepared)
        return self._settings.trajectories if prepared.failure is not None else len(prepared.batch.trajectories)
