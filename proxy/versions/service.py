"""Policy versions: the head, and the commit that creates the next version and consumes its trajectories."""

from __future__ import annotations

from functools import partial

import msgspec
from sqlalchemy import Connection

from proxy.clock import Clock
from proxy.contract.claim import CommitReply, CommitRequest
from proxy.contract.policy import Head, VersionState, WeightsFormat, WeightsReference
from proxy.contract.step import Fit
from proxy.database.unit_of_work import Database
from proxy.errors import Conflict, InvalidRequest
from proxy.lifecycle.events import append_event
from proxy.lifecycle.signals import Signals
from proxy.lifecycle.weights import weights_of
from proxy.runs.service import RunView
from proxy.versions.inspector import WeightsInspector
from proxy.versions.norms import FIT_FLOOR, STEP_FLOOR
from proxy.versions.references import check_has_files, check_sha256
from proxy.versions.release import enter
from proxy.versions.repository import VersionRepository, storable, wanted_version


class VersionView(msgspec.Struct, frozen=True, kw_only=True):
    """A version as the API lists it. `weights` is None for the base model; times are seconds since the epoch.
    Until `is_saved`, its weights are in its trainer's memory and perhaps nowhere else. After `weights_removed_at`
    its files may be deleted to save space. `rejected_because` is the reason why it was rejected or rolled back.
    `begun_from` is the version of another run that has the weights of version 0, if the run began from one."""

    version: int
    parent: int | None
    state: VersionState
    weights: WeightsReference | None
    is_saved: bool
    weights_removed_at: float | None
    rejected_because: str | None
    metrics: dict[str, float | None]
    created_at: float
    canary_at: float | None
    served_at: float | None
    swap_seconds: float | None
    begun_from: str | None = None


class VersionService:
    """The chain of versions of every run."""

    def __init__(self, *, database: Database, clock: Clock, signals: Signals, inspector: WeightsInspector) -> None:
        self._database = database
        self._clock = clock
        self._signals = signals
        self._inspector = inspector

    async def head(self, run: RunView) -> Head:
        """Return the version to train from."""
        row, version = await self._database.read(lambda connection: VersionRepository(connection).head(run.id))
        return Head(
            run_id=run.id,
            run_name=row.name,
            version=row.head_version,
            base_model=row.base_model,
            weights=weights_of(version),
            max_new_tokens=run.settings.max_new_tokens,
            weights_kind=run.settings.weights,
            trainer=run.settings.trainer,
            is_saved=version.is_saved,
        )

    async def is_wanted(self, run: RunView, version: int) -> bool:
        """Return whether engines should serve this version now."""
        row = await self._database.read(lambda connection: VersionRepository(connection).run(run.id))
        return wanted_version(row) == version

    async def list_(self, run: RunView) -> list[VersionView]:
        """Return all versions, newest first."""
        rows = await self._database.read(lambda connection: VersionRepository(connection).versions(run.id))
        return [
            VersionView(
                version=row.version,
                parent=row.parent_version,
                state=VersionState(row.state),
                weights=weights_of(row, with_files=False),
                is_saved=row.is_saved,
                weights_removed_at=row.weights_removed_at,
                rejected_because=row.rejected_because,
                metrics=row.metrics,
                created_at=row.created_at,
                canary_at=row.canary_at,
                served_at=row.served_at,
                swap_seconds=row.swap_seconds,
                begun_from=run.begun_from if row.version == 0 else None,
            )
            for row in rows
        ]

    async def commit(self, run: RunView, request: CommitRequest) -> CommitReply:
        """Create the next version and consume the claims' trajectories, both or neither.

        A repeated commit, with the same claims and the same weights, gets the same answer. Raises Conflict if the
        parent is not the head or not saved, or a claim's lease has expired; WeightsRejected, with nothing consumed,
        for weights that no engine should load; StorageUnavailable while they cannot be read.

        A version that is not saved consumes nothing yet (`UnsavedVersions`). Of an offered one, names and shapes are
        checked; no file is there that could be read.

        An expired lease is refused even if nobody has claimed the trajectories since: otherwise the outcome would
        depend on whether another trainer happened to ask meanwhile.
        """
        _check(request)
        _check_kind(run, request.weights)
        found = await self._database.read(partial(_repetition_or_parent, run=run, request=request))
        if isinstance(found, CommitReply):
            return found
        # Gigabytes may have to be read for the check, so it comes before the transaction and after the cheap checks.
        if request.offer is not None:
            await self._inspector.check_offer(request.weights, request.offer, run.base_model)
        else:
            await self._check_weights(run, request, found)
        reply = await self._database.commit(partial(_commit, run=run, request=request, clock=self._clock))
        if not reply.repeated:
            self._signals.versions.notify()
            self._signals.events.notify()
        return reply

    async def _check_weights(self, run: RunView, request: CommitRequest, parent: WeightsReference | None) -> None:
        if request.is_saved:
            await self._inspector.check(request.weights, run.base_model)
        else:
            await self._inspector.check_in_memory(request.weights, run.base_model)
        floor = FIT_FLOOR if _fit_of(request) is not None else STEP_FLOOR
        await self._inspector.compare(request.weights, parent, run.base_model, floor=floor)


def _commit(connection: Connection, *, run: RunView, request: CommitRequest, clock: Clock) -> CommitReply:
    repository = VersionRepository(connection)
    # Another commit may have come since the checks before: they are made again, now under the run's lock.
    repeated = _repetition(repository, run, request, lock=True)
    if repeated is not None:
        return repeated
    now = clock()
    dead = repository.dead_claims(run.id, request.claim_ids, now)
    if dead:
        raise Conflict(f"no live lease for {', '.join(dead)}", param="claim_ids")
    # Rejected versions may lie beyond the head, and a number is never used twice.
    version = repository.newest(run.id) + 1
    repository.insert_version(run.id, version, request, now=now)
    if request.is_saved:
        sessions = repository.consume(run.id, request.claim_ids, version, now=now)
    else:
        # The claims stay leased: if the version is lost before it is on the disk, they expire and are trained again.
        sessions = repository.count_sessions(request.claim_ids)
        repository.move_head(run.id, version)
    data = {
        "version": version,
        "parent": request.parent_version,
        "claims": len(request.claim_ids),
        "sessions": sessions,
        "metrics": storable(request.step.metrics),
    }
    enter(repository, run, version, parent=request.parent_version)
    append_event(connection, run_id=run.id, kind="version.committed", data=data, now=now)
    return CommitReply(version=version, repeated=False)


def _repetition_or_parent(
    connection: Connection, *, run: RunView, request: CommitRequest
) -> CommitReply | WeightsReference | None:
    """Return the reply of the same commit made before; else the weights of the parent, None for the base model."""
    repository = VersionRepository(connection)
    repeated = _repetition(repository, run, request, lock=False)
    return repeated or weights_of(repository.version(run.id, request.parent_version))


def _fit_of(request: CommitRequest) -> Fit | None:
    return request.step.inputs.fit if request.step.inputs is not None else None


def _repetition(
    repository: VersionRepository, run: RunView, request: CommitRequest, *, lock: bool
) -> CommitReply | None:
    """Return the reply of the same commit made before, if there was one. Raise Conflict if the head has moved."""
    head = repository.run(run.id, lock=lock).head_version
    version = None
    if request.claim_ids:
        version = repository.committed_as(run.id, request.claim_ids, request.weights.sha256)
    if version is None and not (request.claim_ids and request.is_saved):
        version = repository.made_as(run.id, request.parent_version, request.weights)
    if version is not None:
        return CommitReply(version=version, repeated=True)
    if request.parent_version != head:
        raise Conflict(f"the head is version {head}, not {request.parent_version}", param="parent_version")
    if not repository.version(run.id, head).is_saved:
        raise Conflict(
            f"version {head} is in its trainer's memory and not on the disk yet: commit again when it is, or start"
            " the trainer again, which takes it back",
            param="parent_version",
        )
    return None


def _check_kind(run: RunView, weights: WeightsReference) -> None:
    """Raise InvalidRequest for whole weights of a run whose versions are adapters."""
    if run.settings.weights == "adapter" and weights.format is not WeightsFormat.ADAPTER:
        raise InvalidRequest(
            f'the run {run.name!r} has weights = "adapter", so each version must be an adapter: train it with a'
            ' [trainer.adapter] section and publish = "adapter"',
            param="weights.format",
        )


def _check(request: CommitRequest) -> None:
    """Raise InvalidRequest for a commit that contradicts itself or lacks a part."""
    fit = _fit_of(request)
    if not request.claim_ids and fit is None:
        raise InvalidRequest(
            "a commit names the claims that it consumes, or the data that it was fitted to", param="claim_ids"
        )
    if request.claim_ids and fit is not None:
        raise InvalidRequest(
            "a commit of a fitted version consumes no claims: leave claim_ids empty", param="claim_ids"
        )
    if len(set(request.claim_ids)) != len(request.claim_ids):
        raise InvalidRequest("a claim is named twice", param="claim_ids")
    turns = [audit.turn_id for audit in request.step.tokens]
    if len(set(turns)) != len(turns):
        raise InvalidRequest("step.tokens has a turn twice", param="step.tokens")
    if request.offer is None:
        check_has_files(request.weights)
        return
    check_sha256(request.weights)
    if request.is_saved or request.weights.format is not WeightsFormat.HUGGINGFACE:
        raise InvalidRequest("an offer is of whole weights that are not saved yet", param="offer")
