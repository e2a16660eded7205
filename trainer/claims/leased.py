"""The claims that this process has leased: those of the current batch, and those that wait for the next version.

A batch that teaches nothing (all advantages are zero, or the gradient is not finite) makes no version of its own,
because engines would swap to equal weights. Its claims stay leased and are committed together with the next version,
so that they too are consumed exactly once.

A batch may consist of several claims: `take_more` joins further ones to the first. They are kept, committed or given
back together. If the process dies, all their leases expire, or its successor gives them back; before the commit none
of them has had an effect.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

import msgspec
import structlog

from proxy.contract.claim import ClaimedBatch, ClaimRequest, TrajectoryAudit
from proxy.contract.identifiers import ClaimId
from trainer.batching.grouping import joined
from trainer.claims.leases import LeaseKeeper
from trainer.claims.presence import Presence
from trainer.config import BatchSettings
from trainer.errors import ClaimLost, HeadMoved, ProxySilent
from trainer.proxy_client import ProxyClient
from trainer.publish.accepted import Accepted

MOST_KEPT = 8
"""Number of claims that are held at most, so that leases do not pile up: when kept claims reach it, they are
committed with a version of unchanged weights, and a batch is not filled up beyond it."""

_log = structlog.get_logger("trainer.claims")


class Consumption(NamedTuple):
    """The claims that a version consumes: the kept ones in their order, then those of the batch that was trained,
    with their audits, and the claims of each batch that consists of several."""

    claim_ids: tuple[ClaimId, ...]
    audits: tuple[TrajectoryAudit, ...]
    taken_together: tuple[tuple[ClaimId, ...], ...]


class LeasedClaims:
    """The claims of one run. Only the first rank uses them."""

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
        self._committing: frozenset[ClaimId] = frozenset()
        """The claims of the version that is being written and committed while the next batch is trained."""
        self._kept: dict[ClaimId, tuple[TrajectoryAudit, ...]] = {}
        self._joined: dict[ClaimId, tuple[ClaimId, ...]] = {}
        """The claims that were joined to a batch, by the first claim of the batch."""

    def take(self, version: int, *, waits: bool = True) -> ClaimedBatch | None:
        """Claim the next batch to train from `version`. Return None if there was too little within the waiting time,
        or, without `waits`, if there is no whole batch at once.

        Raises HeadMoved if the proxy's head is another version by now, ClaimLost if a kept claim has lost its lease,
        ConfigurationError where the run's engine would not load what would be made of it.
        """
        # A lost kept claim would make the next commit fail: better before a batch is trained than after.
        self.check_held(tuple(self._kept))
        settings = self._settings
        at_least = settings.at_least if waits else settings.trajectories
        batch = self._claim(version, settings.trajectories, at_least, settings.wait_seconds if waits else 0.0)
        if batch is not None and self._accepted.is_unknown:
            with suppress(ProxySilent):  # the batch is leased all the same, and the next `take` asks again
                self._accepted.check(self._client.head())
        return batch

    def take_more(self, batch: ClaimedBatch, want: int, wait_s: float) -> ClaimedBatch | None:
        """Claim about `want` further trajectories and join them to `batch`, which is returned with them. Return None
        if none came within `wait_s` seconds. `room_for_more` says how often this may be done.

        Raises HeadMoved if the proxy's head is another version than that of the batch, ProxySilent.
        """
        if batch.claim_id is None:
            raise ValueError("only a batch that was claimed can be joined by more")
        more = self._claim(batch.base_version, want, 1, wait_s)
        if more is None or more.claim_id is None:
            return None
        self._joined[batch.claim_id] = (*self.joined_to(batch.claim_id), more.claim_id)
        return joined([batch, more])

    def joined_to(self, claim_id: ClaimId) -> tuple[ClaimId, ...]:
        """Return the claims that were joined to the batch that began with `claim_id`."""
        return self._joined.get(claim_id, ())

    def room_for_more(self, batch: ClaimedBatch) -> int:
        """Return how many claims may yet be joined to `batch` without holding more than MOST_KEPT."""
        own = 0 if batch.claim_id is None else len(self._whole(batch.claim_id))
        return MOST_KEPT - len(self._kept) - own

    def _joins(self) -> tuple[tuple[ClaimId, ...], ...]:
        """Return the claims of each held batch that consists of several, in the order in which they were joined."""
        return tuple((first, *more) for first, more in self._joined.items())

    def _claim(self, version: int, want: int, at_least: int, wait_s: float) -> ClaimedBatch | None:
        # The proxy counts from its head, which is one version behind the weights while their version is committed.
        lag = 1 if self._committing else 0
        batch = self._client.claim(
            ClaimRequest(
                trainer=self._trainer,
                process=self._process,
                want=want,
                at_least=at_least,
                max_staleness=self._settings.max_staleness - lag,
                wait_s=wait_s,
            )
        )
        # Held before the version is checked, so that `give_back` releases a claim of the wrong version.
        if batch.claim_id is not None:
            self._leases.hold(batch.claim_id, batch.lease_expires_at)
        if not version - lag <= batch.base_version <= version:
            raise HeadMoved(f"the head is version {batch.base_version}, not {version}")
        return msgspec.structs.replace(batch, base_version=version) if batch.claim_id is not None else None

    def await_proxy(self) -> None:
        """Wait until the proxy answers, at most for the client's patience. Raises ProxySilent, ProxyRefused."""
        self._client.head()

    def keep(self, claim_id: ClaimId, audits: Sequence[TrajectoryAudit]) -> bool:
        """Keep the claims of a batch for the next version. Return whether there are so many that the version is due
        now."""
        self._kept[claim_id] = tuple(audits)
        self._kept |= dict.fromkeys(
            self.joined_to(claim_id), ()
        )  # the audits of the batch are stored with its first claim
        return len(self._kept) >= MOST_KEPT

    def begin_commit(self, current: ClaimId | None, audits: Sequence[TrajectoryAudit]) -> Consumption:
        """Return the claims that a version consumes. From now on they belong to that version, and their leases are
        renewed until `consumed` or `give_back`.

        Raises ClaimLost if one of them has lost its lease, even a kept one: the running means include its rewards,
        and the consumed claims must be those that the weights depend on.
        """
        ids = self._due(current)
        self.check_held(ids)
        due = Consumption(ids, (*(audit for kept in self._kept.values() for audit in kept), *audits), self._joins())
        self._committing = frozenset(ids)
        self._kept.clear()
        self._joined.clear()
        return due

    def _due(self, current: ClaimId | None) -> tuple[ClaimId, ...]:
        return (*self._kept, *(self._whole(current) if current is not None else ()))

    def _whole(self, claim_id: ClaimId) -> tuple[ClaimId, ...]:
        return (claim_id, *self.joined_to(claim_id))

    def check_held(self, claim_ids: Sequence[ClaimId]) -> None:
        """Raise ClaimLost if the lease of one of the claims has ended."""
        for claim_id in claim_ids:
            if not self._leases.is_held(claim_id):
                raise ClaimLost(f"{claim_id}: its lease ended before its version was made")

    def consumed(self, claim_ids: Sequence[ClaimId]) -> None:
        """Record that the claims of `begin_commit` are committed. Another thread than the loop's may call this."""
        for claim_id in claim_ids:
            self._leases.drop(claim_id)
        self._committing = frozenset()

    def pause_run(self, reason: str) -> None:
        """Pause the run: nothing more can be taken until somebody resumes it. Kept claims stay held."""
        self._client.pause_run(reason)

    def give_back(self) -> None:
        """Release all held claims. Those that cannot be released now come back when their leases expire."""
        for claim_id in self._drop_all():
            if self._client.release(claim_id):
                _log.info("claim given back", claim=claim_id)

    def leave(self) -> None:
        """Release all claims of the process at its end, including claims whose reply was lost."""
        for claim_id in self._client.release_own(self._process, known=self._drop_all()):
            _log.info("claim given back", claim=claim_id)

    def _drop_all(self) -> list[ClaimId]:
        """Stop renewing all held claims and return them."""
        held = self._leases.held()
        for claim_id in held:
            self._leases.drop(claim_id)
        self._kept.clear()
        self._joined.clear()
        self._committing = frozenset()
        return held


def take_over(presence: Presence, client: ProxyClient) -> None:
    """Announce this trainer and give back the claims of dead trainers on this machine, so that nobody waits for
    their leases. If this process dies in between, the next one does it."""
    # Announced first: two trainers that start together must not take each other for dead.
    presence.announce()
    for process in presence.dead():
        released = client.release_abandoned(process)
        presence.forget(process)
        _log.info("an earlier trainer died; its claims are given back", process=process, claims=released.claim_ids)
