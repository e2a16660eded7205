"""Rows that judging reads and writes."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, insert, select

from proxy.contract.states import RunState
from proxy.database.rows import AnyRow
from proxy.database.tables import JudgementRow, RunRow, SessionRow


class JudgementRepository:
    """Queries that run within one transaction."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def run(self, run_id: str) -> AnyRow | None:
        """Return `name` and `config` of a run that is not deleted."""
        statement = select(RunRow.name, RunRow.config)
        return self._connection.execute(
            statement.where(RunRow.id == run_id, RunRow.state != RunState.DELETED.value)
        ).one_or_none()

    def outcome(self, session_id: str) -> str | None:
        statement = select(SessionRow.outcome).where(SessionRow.id == session_id)
        return self._connection.execute(statement).scalar_one_or_none()

    def scored(self, session_id: str, judge: str, fingerprint: str, digest: str) -> str | None:
        """Return the reward of the judge, in this form, for this content of the session."""
        statement = select(JudgementRow.reward_id).where(
            JudgementRow.session_id == session_id,
            JudgementRow.judge == judge,
            JudgementRow.fingerprint == fingerprint,
            JudgementRow.digest == digest,
            JudgementRow.reward_id.is_not(None),
        )
        return self._connection.execute(statement).scalar_one_or_none()

    def add(self, row: dict[str, Any]) -> None:
        self._connection.execute(insert(JudgementRow).values(row))
