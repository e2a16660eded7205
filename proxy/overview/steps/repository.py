"""The queries of one step. Each is bounded by the step's own batch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from sqlalchemy import Connection, Row, bindparam, select

from proxy.database.tables import (
    ClaimedSessionRow,
    GroupRow,
    PolicyVersionRow,
    RewardRow,
    SessionRow,
    TokenAuditRow,
    TurnRow,
)

AnyRow = Row[*tuple[Any, ...]]

_CHUNK = 500


class StepRepository:
    """Queries that run within one read transaction."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def version(self, run_id: str, version: int) -> AnyRow | None:
        statement = select(PolicyVersionRow.__table__).where(
            PolicyVersionRow.run_id == run_id, PolicyVersionRow.version == version
        )
        return self._connection.execute(statement).one_or_none()

    def handed_out(self, claim_ids: Sequence[str]) -> list[AnyRow]:
        """The sessions of the claims, with their groups and how their rewards stand now."""
        return [row for part in _chunks(claim_ids) for row in self._connection.execute(_SESSIONS, {"ids": part})]

    def rewards_of(self, session_ids: Sequence[str]) -> list[AnyRow]:
        """All entries, in order of arrival."""
        rows = [row for part in _chunks(session_ids) for row in self._connection.execute(_LEDGER, {"ids": part})]
        return sorted(rows, key=lambda row: row.sequence)

    def sampled(self, run_id: str, version: int) -> set[str]:
        """The sessions whose tokens are kept."""
        statement = (
            select(TokenAuditRow.session_id)
            .where(TokenAuditRow.run_id == run_id, TokenAuditRow.version == version)
            .distinct()
        )
        return set(self._connection.execute(statement).scalars())

    def tokens(self, run_id: str, version: int) -> list[AnyRow]:
        """Audited turns, each with its `ordinal` and `output_ids` where the turn is still there."""
        statement = (
            select(TokenAuditRow.__table__, TurnRow.ordinal, TurnRow.output_ids)
            .outerjoin(TurnRow, TurnRow.id == TokenAuditRow.turn_id)
            .where(TokenAuditRow.run_id == run_id, TokenAuditRow.version == version)
            .order_by(TokenAuditRow.session_id, TurnRow.ordinal, TokenAuditRow.turn_id)
        )
        return list(self._connection.execute(statement).all())


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


def _chunks(ids: Sequence[str]) -> Iterable[list[str]]:
    """Databases bound the number of parameters of a statement."""
    return (list(ids[start : start + _CHUNK]) for start in range(0, len(ids), _CHUNK))
