"""The queries of a run's versions and of single steps. Each is bounded by a limit or by the step's batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, Select, Text, bindparam, cast, func, select

from proxy.contract.policy import VersionState
from proxy.contract.states import RunState
from proxy.database.chunks import chunks
from proxy.database.rows import AnyRow
from proxy.database.tables import (
    ClaimedSessionRow,
    GroupRow,
    PolicyVersionRow,
    RewardRow,
    RunRow,
    SessionRow,
    TokenAuditRow,
    TurnRow,
    VersionFindingRow,
)


class StepOverviewRepository:
    """Queries that run within one read transaction."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def _all(self, statement: Select[*tuple[Any, ...]]) -> Sequence[AnyRow]:
        return self._connection.execute(statement).all()

    def version(self, run_id: str, version: int) -> AnyRow | None:
        statement = select(PolicyVersionRow.__table__).where(
            PolicyVersionRow.run_id == run_id, PolicyVersionRow.version == version
        )
        return self._connection.execute(statement).one_or_none()

    # Versions of a run

    def versions(self, run_id: str, *, below: int | None, limit: int) -> Sequence[AnyRow]:
        """Return versions newest first, without the large columns."""
        statement = select(*_STEP_COLUMNS).where(PolicyVersionRow.run_id == run_id)
        if below is not None:
            statement = statement.where(PolicyVersionRow.version < below)
        return self._all(statement.order_by(PolicyVersionRow.version.desc()).limit(limit))

    def version_times(self, run_id: str, limit: int) -> Sequence[AnyRow]:
        """Return `version`, `created_at`, `served_at` and `swap_seconds` of the newest versions, newest first."""
        statement = select(
            PolicyVersionRow.version,
            PolicyVersionRow.created_at,
            PolicyVersionRow.served_at,
            PolicyVersionRow.swap_seconds,
        ).where(PolicyVersionRow.run_id == run_id)
        return self._all(statement.order_by(PolicyVersionRow.version.desc()).limit(limit))

    def audits(self, run_id: str, versions: Sequence[int]) -> dict[int, str]:
        """Return the audits by version, as stored JSON."""
        statement = select(PolicyVersionRow.version, cast(PolicyVersionRow.audit, Text).label("audit")).where(
            PolicyVersionRow.run_id == run_id, PolicyVersionRow.version.in_(versions)
        )
        return {row.version: row.audit for row in self._all(statement)}

    def learning_rates(self, run_id: str, limit: int) -> list[float]:
        """Return the learning rates of the newest versions, newest first; versions that no gradient made have
        none."""
        statement = (
            select(PolicyVersionRow.metrics)
            .where(PolicyVersionRow.run_id == run_id, PolicyVersionRow.version > 0)
            .order_by(PolicyVersionRow.version.desc())
            .limit(limit)
        )
        rates = [metrics.get("learning_rate") for (metrics,) in self._all(statement)]
        return [rate for rate in rates if rate is not None]

    def mismatch(self, run_id: str, head: int) -> float | None:
        """Return the difference between engine and trainer that the head's step reported as a warning, else None."""
        statement = select(PolicyVersionRow.metrics).where(
            PolicyVersionRow.run_id == run_id, PolicyVersionRow.version == head
        )
        metrics = self._connection.execute(statement).scalar_one_or_none()
        return None if not metrics else metrics.get("mismatch_warning")

    def rejected_beyond(self, run_id: str, head: int) -> AnyRow | None:
        """Return `version` and `rejected_because` of the newest rejected version after the head, if any."""
        statement = (
            select(PolicyVersionRow.version, PolicyVersionRow.rejected_because)
            .where(
                PolicyVersionRow.run_id == run_id,
                PolicyVersionRow.version > head,
                PolicyVersionRow.state == VersionState.REJECTED.value,
            )
            .order_by(PolicyVersionRow.version.desc())
            .limit(1)
        )
        return self._connection.execute(statement).one_or_none()

    def taken_back_beyond(self, run_id: str, head: int) -> AnyRow | None:
        """Return `version` and `text`, the reason, of the newest version after the head that was rolled back
        automatically, if any."""
        statement = (
            select(VersionFindingRow.version, VersionFindingRow.text)
            .where(
                VersionFindingRow.run_id == run_id,
                VersionFindingRow.version > head,
                VersionFindingRow.gate == "watch",
                VersionFindingRow.state == "failed",
            )
            .order_by(VersionFindingRow.version.desc())
            .limit(1)
        )
        return self._connection.execute(statement).one_or_none()

    def last_steps(self) -> Sequence[AnyRow]:
        """Return each run's `name` with `version`, `created_at` and `metrics` of its newest step."""
        statement = select(
            RunRow.name, PolicyVersionRow.version, PolicyVersionRow.created_at, PolicyVersionRow.metrics
        ).where(
            PolicyVersionRow.run_id == RunRow.id,
            PolicyVersionRow.version == RunRow.head_version,
            PolicyVersionRow.version > 0,
            RunRow.state != RunState.DELETED.value,
        )
        return self._all(statement)

    def swap_counts(self) -> dict[str, int]:
        """Count swaps by run; runs without swaps are omitted."""
        statement = (
            select(PolicyVersionRow.run_id, func.count().label("swaps"))
            .where(PolicyVersionRow.version > 0, PolicyVersionRow.served_at.is_not(None))
            .group_by(PolicyVersionRow.run_id)
        )
        return {row.run_id: row.swaps for row in self._all(statement)}

    # The batch of one step

    def handed_out(self, claim_ids: Sequence[str]) -> list[AnyRow]:
        """Return the sessions of the claims, with their groups and current rewards."""
        return [row for part in chunks(claim_ids) for row in self._connection.execute(_SESSIONS, {"ids": part})]

    def rewards_of(self, session_ids: Sequence[str]) -> list[AnyRow]:
        """Return all ledger entries of the sessions, in order of arrival."""
        rows = [row for part in chunks(session_ids) for row in self._connection.execute(_LEDGER, {"ids": part})]
        return sorted(rows, key=lambda row: row.sequence)

    def sampled(self, run_id: str, version: int) -> set[str]:
        """Return the sessions whose tokens the step stored."""
        statement = (
            select(TokenAuditRow.session_id)
            .where(TokenAuditRow.run_id == run_id, TokenAuditRow.version == version)
            .distinct()
        )
        return set(self._connection.execute(statement).scalars())

    def tokens(self, run_id: str, version: int) -> list[AnyRow]:
        """Return audited turns, with `ordinal` and `output_ids` of those that still exist."""
        statement = (
            select(TokenAuditRow.__table__, TurnRow.ordinal, TurnRow.output_ids)
            .outerjoin(TurnRow, TurnRow.id == TokenAuditRow.turn_id)
            .where(TokenAuditRow.run_id == run_id, TokenAuditRow.version == version)
            .order_by(TokenAuditRow.session_id, TurnRow.ordinal, TokenAuditRow.turn_id)
        )
        return list(self._connection.execute(statement).all())


_STEP_COLUMNS = [
    column
    for column in PolicyVersionRow.__table__.c
    if column.name not in ("audit", "inputs", "weights_files", "engine_deaths")
]

_SESSIONS = (
    select(
        ClaimedSessionRow.claim_id,
        ClaimedSessionRow.session_id,
        ClaimedSessionRow.position,
        ClaimedSessionRow.reward_ids,
        SessionRow.task,
        SessionRow.external_id,
        SessionRow.group_id,
        SessionRow.reward.label("reward_now"),
        SessionRow.revised_at,
        GroupRow.name.label("group_name"),
    )
    .join(SessionRow, SessionRow.id == ClaimedSessionRow.session_id)
    .outerjoin(GroupRow, GroupRow.id == SessionRow.group_id)
    .where(ClaimedSessionRow.claim_id.in_(bindparam("ids", expanding=True)))
    .order_by(ClaimedSessionRow.claim_id, ClaimedSessionRow.position)
)

_LEDGER = select(
    RewardRow.sequence,
    RewardRow.id,
    RewardRow.session_id,
    RewardRow.turn_id,
    RewardRow.name,
    RewardRow.source,
    RewardRow.value,
).where(RewardRow.session_id.in_(bindparam("ids", expanding=True)))
