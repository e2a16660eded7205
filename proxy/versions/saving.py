"""Versions that engines read from shared memory, or get from the trainer, before their directories are on the disk.

Such a version is the head and is served, and its claims are still leased. When its trainer reports that the directory
is complete, the claims are consumed. If the trainer or the machine stops before, the next trainer has the version
taken back: its parent, which is on the disk, is the head again, and the claims' sessions are trained with it.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from sqlalchemy import Connection

from proxy.clock import Clock
from proxy.contract.claim import CommitReply
from proxy.contract.policy import WeightsReference
from proxy.database.rows import AnyRow
from proxy.database.unit_of_work import Database
from proxy.errors import Conflict, NotFound, WeightsRejected
from proxy.lifecycle.events import append_event
from proxy.lifecycle.signals import Signals
from proxy.lifecycle.weights import weights_of
from proxy.log import logger
from proxy.runs.service import RunView
from proxy.versions.inspector import WeightsInspector
from proxy.versions.norms import STEP_FLOOR
from proxy.versions.references import check_has_files
from proxy.versions.repository import WITHDRAWN, VersionRepository
from proxy.versions.withdrawal_repository import WithdrawalRepository

_LOST = "it was in its trainer's memory and not on the disk yet when the trainer ended"

_OTHER_WEIGHTS = "version {} was committed with other weights"

_LOG = logger(__name__)


class UnsavedVersions:
    """The two ends of the time in which a version is in its trainer's memory only, for all runs."""

    def __init__(self, *, database: Database, clock: Clock, signals: Signals, inspector: WeightsInspector) -> None:
        self._database = database
        self._clock = clock
        self._signals = signals
        self._inspector = inspector

    async def save(self, run: RunView, version: int, weights: WeightsReference) -> CommitReply:
        """Record that a version's directory is on the disk, and consume its claims. `weights` are those of the commit
        with the checksums of all files, the trainer state's included.

        Of an offered version nothing but names and shapes could be checked before, so the files are read and checked
        now; if they are bad, the version is taken back.

        A repeated request gets the same answer. Raises NotFound for an unknown version; Conflict if it has other
        weights, was withdrawn meanwhile, or a claim's lease has expired; WeightsRejected if its files are not there.
        """
        if (
            parent := await self._database.read(
                partial(_parent_of_offered, run=run, version=version, weights=weights)
            )
        ) is not None:
            await self._check_offered(run, version, weights, parent)
        else:
            # Names and sizes only: the content was checked in memory, and is again before an engine reads it from
            # here.
            await self._inspector.check_listing(weights)
        reply = await self._database.commit(
            partial(_save, run=run, version=version, weights=weights, clock=self._clock)
        )
        # Engines that do not see the trainer's memory load the version now.
        self._signals.versions.notify()
        return reply

    async def _check_offered(self, run: RunView, version: int, weights: WeightsReference, parent: _Parent) -> None:
        check_has_files(weights)
        try:
            await self._inspector.check(weights, run.base_model)
            await self._inspector.compare(weights, parent.weights, run.base_model, floor=STEP_FLOOR)
        except WeightsRejected as error:
            await self.take_back(run, f"its files are bad: {error.message}", only=version)
            raise Conflict(f"the version was taken back: {error.message}", param="weights") from error

    async def take_back(self, run: RunView, reason: str = _LOST, *, only: int | None = None) -> None:
        """Take the head back if it is not on the disk; with `only`, if it is that version. Its parent becomes the
        head, and engines load it.

        A trainer calls this when it starts. Another one that is still writing that version is refused when it reports
        the directory, and starts again from the head.
        """
        taken = await self._database.commit(partial(_take_back, run=run, reason=reason, only=only, clock=self._clock))
        if taken is not None:
            _LOG.warning("a version was taken back", run=run.name, version=taken, reason=reason)
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
    if not _is_committed(row, weights):
        raise Conflict(_OTHER_WEIGHTS.format(version), param="weights")
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


def _is_committed(row: AnyRow, weights: WeightsReference) -> bool:
    """Return whether these are a version's weights as they were committed, apart from files that were added."""
    if row.offer is not None:  # which had no checksums yet
        return bool(row.weights_uri == weights.uri)
    committed = (row.weights_uri, row.weights_sha256, row.weights_bytes)
    files = row.weights_files or {}
    return committed == (weights.uri, weights.sha256, weights.bytes) and files.items() <= weights.files.items()


class _Parent(NamedTuple):
    """The weights of a version's parent; None for the base model."""

    weights: WeightsReference | None


def _parent_of_offered(
    connection: Connection, *, run: RunView, version: int, weights: WeightsReference
) -> _Parent | None:
    """Return the parent of a version that its trainer offers; None for other versions. Raises Conflict if the version
    has another directory than `weights`."""
    repository = VersionRepository(connection)
    row = repository.find(run.id, version)
    if row is None or row.offer is None:
        return None
    if not _is_committed(row, weights):
        raise Conflict(_OTHER_WEIGHTS.format(version), param="weights")
    return _Parent(weights_of(repository.version(run.id, row.parent_version)))


def _take_back(connection: Connection, *, run: RunView, reason: str, only: int | None, clock: Clock) -> int | None:
    repository = VersionRepository(connection)
    head = int(repository.run(run.id, lock=True).head_version)
    if repository.version(run.id, head).is_saved or only not in (None, head):
        return None
    now = clock()
    WithdrawalRepository(connection).take_back(run.id, [head], reason, now=now)
    data = {
        "to": repository.run(run.id).head_version,
        "versions": [head],
        "sessions_left_out": 0,
        "reason": reason,
        "by": "trainer",
    }
    append_event(connection, run_id=run.id, kind="version.rolled_back", data=data, now=now)
    return head
