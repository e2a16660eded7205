"""The claims that the trainer has in hand: the one it works on, and those that wait for the next version.

A batch that teaches nothing (all advantages zero, or a gradient that is not finite) makes no version of its own:
equal weights would be a swap for nothing. Its claim is kept under lease and committed together with the next version,
so that it too is consumed exactly once.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import structlog

from proxy.contract.claim import ClaimedBatch, ClaimRequest, TrajectoryAudit
from proxy.contract.identifiers import ClaimId
from trainer.config import BatchSettings
from trainer.errors import ClaimLost, HeadMoved, ProxySilent
from trainer.leases import LeaseKeeper
from trainer.presence import Presence
from trainer.proxy_client import ProxyClient
from trainer.weights.accepted import Accepted

MOST_KEPT = 8
"""This many kept claims are committed with a version of unchanged weights, so that leases do not pile up."""

_log = structlog.get_logger("trainer.claims")


class ClaimsInHand:
    """Only the first rank's is used."""

    def __init__(
        self,
        client: ProxyClient,
        leases: LeaseKeeper,
        settings: BatchSettings,
        trainer: str,
        process: str,
        accepted: Accepted,
    ) -> None:
        self._client = client
        self._leases = leases
        self._settings = settings
        self._trainer = trainer
        self._process = process
        self._accepted = accepted
        self._kept: dict[ClaimId, tuple[TrajectoryAudit, ...]] = {}

    def take(self, version: int, *, waits: bool = True) -> ClaimedBatch | None:
        """The next batch to train from `version`; None if there was too little within the waiting time, or, where it
        does not wait, if there is no whole batch at once.

        Raises HeadMoved if the proxy's head is another version by now, ClaimLost if a kept claim has lost its lease,
        ConfigurationError where the run's engine would not load what would be made of it.
        """
        self._check_held(tuple(self._kept))
        settings = self._settings
        batch = self._client.claim(
            ClaimRequest(
                trainer=self._trainer,
                process=self._process,
                want=settings.trajectories,
                at_least=settings.at_least if waits else settings.trajectories,
                max_staleness=settings.max_staleness,
                wait_s=settings.wait_seconds if waits else 0.0,
            )
        )
        if batch.claim_id is not None:
            self._leases.hold(batch.claim_id, batch.lease_expires_at)
        if batch.base_version != version:
            raise HeadMoved(f"the head is version {batch.base_version}, not {version}")
        if batch.claim_id is not None and self._accepted.is_unknown:
            with suppress(ProxySilent):  # the batch is in hand all the same; the next one asks again
                self._accepted.look(self._client.head())
        return batch if batch.claim_id is not None else None

    def await_proxy(self) -> None:
        """Until it answers, or for as long as the client's patience is. Raises ProxySilent, ProxyRefused."""
        self._client.head()

    def keep(self, claim_id: ClaimId, audits: Sequence[TrajectoryAudit]) -> bool:
        """Keeps a claim for the next version; whether that version is due now, whatever it teaches."""
        self._kept[claim_id] = tuple(audits)
        return len(self._kept) >= MOST_KEPT

    def check(self, current: ClaimId | None) -> None:
        """Raises ClaimLost as `to_commit` would, before a version is written in vain."""
        self._check_held(self._of_a_version(current))

    def to_commit(
        self, current: ClaimId | None, audits: Sequence[TrajectoryAudit]
    ) -> tuple[tuple[ClaimId, ...], tuple[TrajectoryAudit, ...]]:
        """The claims that a version consumes, with their audits: those kept, in their order, and `current`.

        Raises ClaimLost if one of them has no lease any more. Of a kept one as well: the running means have seen it,
        and what the weights depend on must be what is consumed.
        """
        ids = self._of_a_version(current)
        self._check_held(ids)
        return ids, (*(audit for kept in self._kept.values() for audit in kept), *audits)

    def _of_a_version(self, current: ClaimId | None) -> tuple[ClaimId, ...]:
        return (*self._kept, *((current,) if current is not None else ()))

    def _check_held(self, claim_ids: Sequence[ClaimId]) -> None:
        for claim_id in claim_ids:
            if not self._leases.is_held(claim_id):
                raise ClaimLost(f"{claim_id}: its lease ended before its version was made")

    def consumed(self, claim_ids: Sequence[ClaimId]) -> None:
        for claim_id in claim_ids:
            self._kept.pop(claim_id, None)
            self._leases.drop(claim_id)

    def pause_run(self, reason: str) -> None:
        """Nothing more can be taken until somebody resumes the run. What is kept stays in hand."""
        self._client.pause_run(reason)

    def give_back(self) -> None:
        """Releases everything; what cannot be released now comes back when its lease expires."""
        for claim_id in self._let_go():
            if self._client.release(claim_id):
                _log.info("claim given back", claim=claim_id)

    def leave(self) -> None:
        """At the end of the process: also what was handed out to it in an answer that it did not see any more."""
        for claim_id in self._client.release_own(self._process, known=self._let_go()):
            _log.info("claim given back", claim=claim_id)

    def _let_go(self) -> list[ClaimId]:
        """What was in hand; none of it is renewed any more."""
        held = self._leases.held()
        for claim_id in held:
            self._leases.drop(claim_id)
        self._kept.clear()
        return held


def take_over(presence: Presence, client: ProxyClient) -> None:
    """Announces this trainer, and gives back what dead ones held on this machine: nobody needs to wait for their
    leases. Dying in between leaves it to the next one."""
    presence.announce()
    for process in presence.dead():
        released = client.release_abandoned(process)
        presence.forget(process)
        _log.info("an earlier trainer died; its claims are given back", process=process, claims=released.claim_ids)
