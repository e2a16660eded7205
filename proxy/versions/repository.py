"""Read and write the rows of policy versions, and of the claims and sessions that their commits consume."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

import msgspec
from sqlalchemy import Connection, case, func, insert, select, update
from sqlalchemy.exc import IntegrityError

from proxy.contract.arrays import pack_ids, pack_logprobs
from proxy.contract.claim import CommitRequest
from proxy.contract.identifiers import ClaimId, RunId
from proxy.contract.policy import VersionState, WeightsReference
from proxy.contract.states import ClaimState, TrainingState
from proxy.contract.step import TokenAudit
from proxy.database.chunks import chunks
from proxy.database.rows import AnyRow
from proxy.database.tables import (
    ClaimedSessionRow,
    ClaimRow,
    PolicyVersionRow,
    RewardRow,
    RunRow,
    SessionRow,
    TokenAuditRow,
)
from proxy.errors import Conflict
from proxy.lifecycle.lifecycle import settle

SERVABLE = (PolicyVersionRow.state != VersionState.REJECTED.value) & PolicyVersionRow.weights_removed_at.is_(None)
WITHDRAWN = (VersionState.REJECTED.value, VersionState.ROLLED_BACK.value)
UNDECIDED = (VersionState.CANDIDATE.value, VersionState.CANARY.value)
"""States of versions that have not passed their gates."""
_ENDED = (VersionState.RETIRED.value, *WITHDRAWN)


def wanted_version(run: AnyRow) -> int:
    """Return the version that engines should serve, from the row of a run: the pinned one, or the newest that passed
    its gates, or the head."""
    for version in (run.pinned_version, run.promoted_version):
        if version is not None:
            return int(version)
    return int(run.head_version)


def storable(value: Any) -> Any:
    """Return the value as JSON can hold it: numbers that are not finite become null, which means unknown."""
    builtin = msgspec.to_builtins(value)
    if isinstance(builtin, float):
        return builtin if math.isfinite(builtin) else None
    if isinstance(builtin, dict):
        return {key: storable(item) for key, item in builtin.items()}
    if isinstance(builtin, list | tuple):
        return [storable(item) for item in builtin]
    return builtin


class VersionRepository:
    """Reads and writes of one transaction."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def run(self, run_id: str, *, lock: bool = False) -> AnyRow:
        """Return name, base model, head, serving, pinned and promoted version. With `lock`, nobody else claims or
        commits meanwhile."""
        statement = select(
            RunRow.name,
            RunRow.base_model,
            RunRow.head_version,
            RunRow.serving_version,
            RunRow.pinned_version,
            RunRow.promoted_version,
        ).where(RunRow.id == run_id)
        # `key_share` locks the row FOR NO KEY UPDATE, so that sessions and turns of the run can be inserted
        # meanwhile.
        return self._connection.execute(statement.with_for_update(key_share=True) if lock else statement).one()

    def head(self, run_id: str) -> tuple[AnyRow, AnyRow]:
        """Return the run and its head version, both read in this transaction."""
        run = self.run(run_id)
        return run, self.version(run_id, run.head_version)

    def target(self, run_id: str, version: int | None = None) -> tuple[AnyRow, AnyRow]:
        """Return the run and a version, by default the one that engines should serve, both read in this
        transaction."""
        run = self.run(run_id)
        return run, self.version(run_id, wanted_version(run) if version is None else version)

    def promote(self, run_id: str, version: int | None) -> None:
        """Make this the version that engines should serve unless the run is pinned; None: the head, whichever that
        is."""
        self._connection.execute(update(RunRow).where(RunRow.id == run_id).values(promoted_version=version))

    def set_state(self, run_id: str, version: int, state: VersionState, **values: Any) -> None:
        of_version = (PolicyVersionRow.run_id == run_id) & (PolicyVersionRow.version == version)
        self._connection.execute(update(PolicyVersionRow).where(of_version).values(state=state.value, **values))

    def find(self, run_id: str, version: int) -> AnyRow | None:
        """Return a version; None if the run has none of this number."""
        statement = select(PolicyVersionRow.__table__).where(
            PolicyVersionRow.run_id == run_id, PolicyVersionRow.version == version
        )
        return self._connection.execute(statement).one_or_none()

    def version(self, run_id: str, version: int) -> AnyRow:
        statement = select(PolicyVersionRow.__table__).where(
            PolicyVersionRow.run_id == run_id, PolicyVersionRow.version == version
        )
        return self._connection.execute(statement).one()

    def versions(self, run_id: str) -> list[AnyRow]:
        """Return all versions, newest first, without their audits."""
        return list(self._connection.execute(_VERSIONS.where(PolicyVersionRow.run_id == run_id)).all())

    def newest(self, run_id: str) -> int:
        """Return the number of the newest version, rejected ones included."""
        statement = select(func.max(PolicyVersionRow.version)).where(PolicyVersionRow.run_id == run_id)
        return int(self._connection.execute(statement).scalar_one())

    def may_serve(self, run_id: str, version: int) -> bool:
        """Return whether the store knows the version and it is not rejected: an engine may answer calls with it until
        it has loaded another one."""
        statement = select(PolicyVersionRow.state).where(
            PolicyVersionRow.run_id == run_id, PolicyVersionRow.version == version
        )
        state = self._connection.execute(statement).scalar_one_or_none()
        return state is not None and state != VersionState.REJECTED.value

    def committed_as(self, run_id: str, claim_ids: Sequence[ClaimId], sha256: str) -> int | None:
        """Return the version that exactly these claims created with these weights; None without one."""
        statement = (
            select(PolicyVersionRow.version, PolicyVersionRow.claim_ids)
            .join(
                ClaimRow,
                (ClaimRow.run_id == PolicyVersionRow.run_id)
                & (ClaimRow.committed_version == PolicyVersionRow.version),
            )
            .where(ClaimRow.id == claim_ids[0], ClaimRow.run_id == run_id, PolicyVersionRow.weights_sha256 == sha256)
        )
        row = self._connection.execute(statement).one_or_none()
        return row.version if row is not None and set(row.claim_ids) == set(claim_ids) else None

    def made_as(self, run_id: str, parent: int, weights: WeightsReference) -> int | None:
        """Return the version that was made from this parent with these weights; None without one. Unlike
        `committed_as`, it finds versions that have consumed no claims: fitted ones, and those not saved yet."""
        statement = select(PolicyVersionRow.version).where(
            PolicyVersionRow.run_id == run_id,
            PolicyVersionRow.parent_version == parent,
            PolicyVersionRow.weights_uri == weights.uri,
            PolicyVersionRow.weights_sha256 == weights.sha256,
        )
        return self._connection.execute(statement.limit(1)).scalar_one_or_none()

    def mark_saved(self, run_id: str, version: int, weights: WeightsReference) -> None:
        """Record that a version's directory is on the disk, with the checksums of all its files. Its trainer sends it
        to nobody from then on."""
        self._connection.execute(
            update(PolicyVersionRow)
            .where(PolicyVersionRow.run_id == run_id, PolicyVersionRow.version == version)
            .values(
                is_saved=True,
                weights_files=weights.files,
                weights_sha256=weights.sha256,
                weights_bytes=weights.bytes,
                offer=None,
            )
        )

    def dead_claims(self, run_id: str, claim_ids: Sequence[ClaimId], now: float) -> list[ClaimId]:
        """Return the claims that are not this run's, are not leased any more, or whose lease has expired."""
        statement = (
            select(ClaimRow.id)
            .where(
                ClaimRow.id.in_(claim_ids),
                ClaimRow.run_id == run_id,
                ClaimRow.state == ClaimState.LEASED.value,
                ClaimRow.lease_expires_at > now,
            )
            .with_for_update(key_share=True)
        )
        live = set(self._connection.execute(statement).scalars())
        return [claim_id for claim_id in claim_ids if claim_id not in live]

    def insert_version(self, run_id: RunId, version: int, request: CommitRequest, *, now: float) -> None:
        """Insert a version with its audit. Raises Conflict if it exists."""
        weights, step = request.weights, request.step
        try:
            self._connection.execute(
                insert(PolicyVersionRow).values(
                    run_id=run_id,
                    version=version,
                    parent_version=request.parent_version,
                    state=VersionState.COMMITTED.value,
                    weights_uri=weights.uri,
                    weights_format=weights.format.value,
                    weights_sha256=weights.sha256,
                    weights_bytes=weights.bytes,
                    weights_files=weights.files or None,
                    is_saved=request.is_saved,
                    offer=storable(request.offer),
                    claim_ids=list(request.claim_ids),
                    config_hash=step.config_hash,
                    seed=step.seed,
                    metrics=storable(step.metrics),
                    audit=storable(step.audit),
                    inputs=storable(step.inputs),
                    probe=storable(request.probe),
                    created_at=now,
                )
            )
        except IntegrityError as error:
            raise Conflict(f"version {version} was committed by another trainer meanwhile") from error
        if step.tokens:
            erased = self._erased({audit.session_id for audit in step.tokens})
            present = [audit for audit in step.tokens if audit.session_id not in erased]
            if present:
                self._connection.execute(
                    insert(TokenAuditRow), [_token_columns(run_id, version, audit) for audit in present]
                )

    def _erased(self, session_ids: Collection[str]) -> set[str]:
        """Return the sessions whose content was erased while a trainer had them."""
        statement = select(SessionRow.id).where(SessionRow.id.in_(session_ids), SessionRow.erased_at.is_not(None))
        return set(self._connection.execute(statement).scalars())

    def consume(self, run_id: str, claim_ids: Sequence[ClaimId], version: int, *, now: float) -> int:
        """Mark the claims as committed and their sessions as consumed by `version`, which becomes the head. Return
        the number of sessions.

        Raises Conflict unless every session of the claims is still leased.
        """
        claims = ClaimRow.id.in_(claim_ids)
        self._connection.execute(
            update(ClaimRow).where(claims).values(state=ClaimState.COMMITTED.value, committed_version=version)
        )
        consumed = self._connection.execute(
            update(SessionRow)
            .where(SessionRow.claim_id.in_(claim_ids), SessionRow.training == TrainingState.LEASED.value)
            .values(training=TrainingState.CONSUMED.value, consumed_by=version)
        )
        handed_out = self.count_sessions(claim_ids)
        if consumed.rowcount != handed_out:
            raise Conflict(f"of {handed_out} claimed sessions only {consumed.rowcount} are still leased")
        self.move_head(run_id, version)
        settle(self._connection, self._rewarded_meanwhile(claim_ids), now=now)
        return handed_out

    def move_head(self, run_id: str, version: int) -> None:
        self._connection.execute(update(RunRow).where(RunRow.id == run_id).values(head_version=version))

    def count_sessions(self, claim_ids: Sequence[ClaimId]) -> int:
        """Return the number of sessions that were handed out with these claims."""
        statement = select(func.count()).select_from(ClaimedSessionRow)
        return int(self._connection.execute(statement.where(ClaimedSessionRow.claim_id.in_(claim_ids))).scalar_one())

    def _rewarded_meanwhile(self, claim_ids: Sequence[ClaimId]) -> list[str]:
        """Return the claims' sessions with rewards that came after the claim, which were not trained on."""
        statement = (
            select(SessionRow.id)
            .distinct()
            .join(RewardRow, RewardRow.session_id == SessionRow.id)
            .where(SessionRow.claim_id.in_(claim_ids), RewardRow.after_training)
        )
        return list(self._connection.execute(statement).scalars())

    def weights_at(self, run_id: str, uris: Sequence[str]) -> list[tuple[str, int]]:
        """Return (uri, version) of the uris that are weights of the run, oldest version first."""
        found: list[tuple[str, int]] = []
        for part in chunks(uris):
            statement = select(PolicyVersionRow.weights_uri, PolicyVersionRow.version).where(
                PolicyVersionRow.run_id == run_id, PolicyVersionRow.weights_uri.in_(part)
            )
            found += [(str(row.weights_uri), row.version) for row in self._connection.execute(statement)]
        return sorted(found, key=lambda each: each[1])

    def servable(self, run_id: str, version: int) -> AnyRow | None:
        """Find a version that is not rejected and whose weights were not removed."""
        statement = select(PolicyVersionRow.__table__).where(
            PolicyVersionRow.run_id == run_id, PolicyVersionRow.version == version, SERVABLE
        )
        return self._connection.execute(statement).one_or_none()

    def servable_versions(self, run_id: str) -> list[int]:
        """Return all versions that `servable` finds."""
        statement = select(PolicyVersionRow.version).where(PolicyVersionRow.run_id == run_id, SERVABLE)
        return sorted(self._connection.execute(statement).scalars())

    def note_asked(self, run_id: str, version: int, *, now: float) -> None:
        """Record that a call asked for this version by its number."""
        of_version = (PolicyVersionRow.run_id == run_id) & (PolicyVersionRow.version == version)
        self._connection.execute(update(PolicyVersionRow).where(of_version).values(asked_at=now))

    def asked_since(self, run_id: str, since: float) -> set[int]:
        """Return the versions that calls asked for by their number at `since` or later."""
        statement = select(PolicyVersionRow.version).where(
            PolicyVersionRow.run_id == run_id, PolicyVersionRow.asked_at >= since
        )
        return set(self._connection.execute(statement).scalars())

    def begun_from(self, run_id: str) -> set[int]:
        """Return the versions of the run from which other runs begin."""
        statement = select(RunRow.begun_from_version).where(RunRow.begun_from_run_id == run_id)
        return {version for version in self._connection.execute(statement).scalars() if version is not None}

    def mark_removed(self, run_id: str, versions: Sequence[int], *, now: float) -> list[int]:
        """Mark the weights of these versions as removed; return those that were not marked before."""
        marked: list[int] = []
        for part in chunks(versions):
            statement = (
                update(PolicyVersionRow)
                .where(
                    PolicyVersionRow.run_id == run_id,
                    PolicyVersionRow.version.in_(part),
                    PolicyVersionRow.weights_removed_at.is_(None),
                )
                .values(weights_removed_at=now)
                .returning(PolicyVersionRow.version)
            )
            marked += self._connection.execute(statement).scalars()
        return marked

    def removed(self, run_id: str, versions: Sequence[int]) -> set[int]:
        """Return the versions among these whose weights are marked as removed."""
        found: set[int] = set()
        for part in chunks(versions):
            statement = select(PolicyVersionRow.version).where(
                PolicyVersionRow.run_id == run_id,
                PolicyVersionRow.version.in_(part),
                PolicyVersionRow.weights_removed_at.is_not(None),
            )
            found.update(self._connection.execute(statement).scalars())
        return found

    def mark_served(self, run_id: str, version: int, *, swap_seconds: float | None, now: float) -> None:
        """Record that the engine serves `version`. Earlier versions are retired, also those that were never
        served."""
        of_run = PolicyVersionRow.run_id == run_id
        self._connection.execute(update(RunRow).where(RunRow.id == run_id).values(serving_version=version))
        self._connection.execute(
            update(PolicyVersionRow)
            .where(of_run, PolicyVersionRow.version < version, PolicyVersionRow.state.not_in(_ENDED))
            .values(state=VersionState.RETIRED.value)
        )
        self._connection.execute(
            update(PolicyVersionRow)
            # The engine may return to an older version; a newer one then no longer serves.
            .where(of_run, PolicyVersionRow.version > version, PolicyVersionRow.state == VersionState.SERVING.value)
            .values(state=VersionState.COMMITTED.value)
        )
        self._connection.execute(
            update(PolicyVersionRow)
            .where(of_run, PolicyVersionRow.version == version, PolicyVersionRow.state.not_in(WITHDRAWN))
            .values(
                state=VersionState.SERVING.value,
                served_at=case((PolicyVersionRow.served_at.is_(None), now), else_=PolicyVersionRow.served_at),
                swap_seconds=swap_seconds,
            )
        )


def _token_columns(run_id: str, version: int, audit: TokenAudit) -> dict[str, Any]:
    return {
        "run_id": run_id,
        "version": version,
        "turn_id": audit.turn_id,
        "session_id": audit.session_id,
        "logprobs": pack_logprobs(audit.logprobs),
        "engine_logprobs": pack_logprobs(audit.engine_logprobs),
        "advantages": pack_logprobs(audit.advantages),
        "staleness": pack_ids(audit.staleness),
        "clipped": bytes(audit.clipped),
    }


_VERSIONS = select(
    PolicyVersionRow.version,
    PolicyVersionRow.parent_version,
    PolicyVersionRow.state,
    PolicyVersionRow.weights_uri,
    PolicyVersionRow.weights_format,
    PolicyVersionRow.weights_sha256,
    PolicyVersionRow.weights_bytes,
    PolicyVersionRow.weights_removed_at,
    PolicyVersionRow.is_saved,
    PolicyVersionRow.rejected_because,
    PolicyVersionRow.metrics,
    PolicyVersionRow.created_at,
    PolicyVersionRow.shadow_at,
    PolicyVersionRow.canary_at,
    PolicyVersionRow.served_at,
    PolicyVersionRow.swap_seconds,
).order_by(PolicyVersionRow.version.desc())
