"""Versions that engines read from shared memory before their directories are on the disk.

Such a version is the head and is served, and its claims are still leased. When its trainer reports that the directory
is complete, the claims are consumed. If the trainer or the machine stops before, the next trainer has the version
taken back: its parent, which is on the disk, is the head again, and the claims' sessions are trained with it.
"""

from __future__ import annotations

from functools import partial

from sqlalchemy import Connection

from proxy.clock import Clock
from proxy.contract.claim import CommitReply
from proxy.contract.policy import WeightsReference
from proxy.database.unit_of_work import Database
from proxy.errors import Conflict, NotFound
from proxy.lifecycle.events import append_event
from proxy.lifecycle.signals import Signals
from proxy.log import logger
from proxy.runs.service import RunView
from proxy.versions.inspector import WeightsInspector
from proxy.versions.repository import WITHDRAWN, VersionRepository
from proxy.versions.withdrawal_repository import WithdrawalRepository

_LOST = "it was in its trainer's memory and not on the disk yet when the trainer ended"

_LOG = logger(__name__)


class UnsavedVersions:
    """The two ends of the time in which a version is in memory only, for all runs."""

    def __init__(self, *, database: Database, clock: Clock, signals: Signals, inspector: WeightsInspector) -> None:
        self._database = database
        self._clock = clock
        self._signals = signals
        self._inspector = inspector

    async def save(self, run: RunView, version: int, weights: WeightsReference) -> CommitReply:
        """Record that a version's directory is on the disk, and consume its claims. `weights` are those of the commit
        with the checksums of all files, the trainer state's included.

        A repeated request gets the same answer. Raises NotFound for an unknown version; Conflict if it has other
        weights, was withdrawn meanwhile, or a claim's lease has expired; WeightsRejected if its files are not there.
        """
        # Names and sizes only: the content was checked in memory, and is again before an engine reads it from here.
        await self._inspector.check_listing(weights)
        reply = await self._database.commit(
            partial(_save, run=run, version=version, weights=weights, clock=self._clock)
        )
        # Engines that do not see the trainer's memory load the version now.
        self._signals.versions.notify()
        return reply

    async def take_back(self, run: RunView) -> None:
        """Take the head back if it is not on the disk. Its parent becomes the head, and engines load it.

        A trainer calls this when it starts. Another one that is still writing that version is refused when it reports
        the directory, and starts again from the head.
        """
        taken = await self._database.commit(partial(_take_back, run=run, clock=self._clock))
        if taken is not None:
            _LOG.warning("a version was lost before it was on the disk", run=run.name, version=taken)
            self._signals.versions.notify()
            self._signals.events.notify()


def _save(
    connection: Connection, *, run: RunView, version: int, weights: WeightsReference, clock: Clock
) -> CommitReply:
    repository = VersionRepository(connection)
    repository.run(run.id, lock=True)
    row = repository.find(run.id, version)
    if row is None:
        raise NotFound(f"the run {run.name!r} has no version {version}", param="version")
    committed = (row.weights_uri, row.weights_sha256, row.weights_bytes)
    changed = [name for name, sha256 in (row.weights_files or {}).items() if weights.files.get(name) != sha256]
    if committed != (weights.uri, weights.sha256, weights.bytes) or changed:
        raise Conflict(f"version {version} was committed with other weights", param="weights")
    if row.is_saved:
        return CommitReply(version=version, repeated=True)
    if row.state in WITHDRAWN:
        raise Conflict(f"version {version} was withdrawn: {row.rejected_because}", param="version")
    now = clock()
    dead = repository.dead_claims(run.id, row.claim_ids, now)
    if dead:
        raise Conflict(f"no live lease for {', '.join(dead)}", param="claim_ids")
    repository.mark_saved(run.id, version, weights)
    repository.consume(run.id, row.claim_ids, version, now=now)
    return CommitReply(version=version, repeated=False)


def _take_back(connection: Connection, *, run: RunView, clock: Clock) -> int | None:
    repository = VersionRepository(connection)
    head = int(repository.run(run.id, lock=True).head_version)
    if repository.version(run.id, head).is_saved:
        return None
    now = clock()
    WithdrawalRepository(connection).take_back(run.id, [head], _LOST, now=now)
    data = {
        "to": repository.run(run.id).head_version,
        "versions": [head],
        "sessions_left_out": 0,
        "reason": _LOST,
        "by": "trainer",
    }
    append_event(connection, run_id=run.id, kind="version.rolled_back", data=data, now=now)
    return head
