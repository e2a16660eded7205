"""Rows of the reward ledger, and what feedback may name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, Row, insert, or_, select

from proxy.database.tables import RewardRow, SessionRow, TurnRow

AnyRow = Row[*tuple[Any, ...]]


class FeedbackRepository:
    """Reads and writes of one transaction."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def session(self, name: str, *, run_id: str | None) -> AnyRow | None:
        """By our id or, within a run, by the client's own name: the newest that has it."""
        statement = select(SessionRow.id, SessionRow.run_id, SessionRow.training)
        if run_id is None:
            statement = statement.where(SessionRow.id == name)
        else:
            statement = statement.where(
                SessionRow.run_id == run_id, or_(SessionRow.id == name, SessionRow.external_id == name)
            ).order_by(SessionRow.id != name, SessionRow.created_at.desc(), SessionRow.id.desc())
        return (self._connection.execute(statement.limit(1))).one_or_none()

    def session_of_turn(self, turn_id: str, *, run_id: str | None) -> str | None:
        statement = select(TurnRow.session_id).where(TurnRow.id == turn_id)
        if run_id is not None:
            statement = statement.where(TurnRow.run_id == run_id)
        return (self._connection.execute(statement)).scalar_one_or_none()

    def under_key(self, *, run_id: str, first: str, last: str) -> list[AnyRow]:
        """Entries whose idempotency keys lie in [first, last), in order of arrival."""
        statement = (
            select(RewardRow.id, RewardRow.session_id, RewardRow.turn_id, RewardRow.after_training)
            .where(RewardRow.run_id == run_id, RewardRow.idempotency_key >= first, RewardRow.idempotency_key < last)
            .order_by(RewardRow.sequence)
        )
        return list((self._connection.execute(statement)).all())

    def insert(self, rows: Sequence[dict[str, Any]]) -> None:
        """In order: of two about the same thing, the later supersedes."""
        for row in rows:
            self._connection.execute(insert(RewardRow).values(row))
