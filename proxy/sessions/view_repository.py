"""Rows for the view of one session."""

from __future__ import annotations

from sqlalchemy import Connection, and_, func, select

from proxy.database.rows import AnyRow
from proxy.database.tables import ClaimedSessionRow, GroupRow, RewardRow, RunRow, SessionRow, TurnRow
from proxy.lifecycle.preferences import preferences_about


class SessionViewRepository:
    """Reads of one session and of all that refers to it, on the connection of one transaction."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def whole(self, session_id: str) -> AnyRow:
        """Return everything about a session that exists.

        The names of its run and group and the rewards that its claim handed out are in the row.
        """
        statement = (
            select(
                SessionRow.__table__,
                RunRow.name.label("run_name"),
                GroupRow.name.label("group_name"),
                ClaimedSessionRow.reward.label("handed_reward"),
                ClaimedSessionRow.reward_ids.label("handed_ids"),
            )
            .join(RunRow, RunRow.id == SessionRow.run_id)
            .join(GroupRow, GroupRow.id == SessionRow.group_id, isouter=True)
            .join(
                ClaimedSessionRow,
                and_(
                    ClaimedSessionRow.claim_id == SessionRow.claim_id, ClaimedSessionRow.session_id == SessionRow.id
                ),
                isouter=True,
            )
            .where(SessionRow.id == session_id)
        )
        return self._connection.execute(statement).one()

    def turns(self, session_id: str) -> list[AnyRow]:
        statement = (
            select(
                TurnRow.id,
                TurnRow.ordinal,
                TurnRow.parent_id,
                TurnRow.finish_reason,
                TurnRow.continuation,
                TurnRow.state,
                TurnRow.attributed_by,
                TurnRow.prefix_tokens,
                TurnRow.prompt_token_count,
                func.coalesce(TurnRow.sampling["temperature"].as_float(), 1.0).label("temperature"),
                func.length(TurnRow.output_logprobs).label("logprob_bytes"),
                TurnRow.started_at,
                TurnRow.finished_at,
            )
            .where(TurnRow.session_id == session_id)
            .order_by(TurnRow.ordinal, TurnRow.id)
        )
        return list(self._connection.execute(statement).all())

    def rewards(self, session_id: str) -> list[AnyRow]:
        """Return the session's rewards in order of arrival."""
        statement = (
            select(
                RewardRow.id,
                RewardRow.turn_id,
                RewardRow.name,
                RewardRow.value,
                RewardRow.source,
                RewardRow.comment,
                RewardRow.after_training,
                RewardRow.created_at,
            )
            .where(RewardRow.session_id == session_id)
            .order_by(RewardRow.sequence)
        )
        return list(self._connection.execute(statement).all())

    def preferences(self, session_id: str) -> list[AnyRow]:
        """Return the preferences about the session in order of arrival."""
        return list(self._connection.execute(preferences_about(session_id)).all())

    def attempts(self, run_id: str, name: str, limit: int) -> list[AnyRow]:
        """Return the run's sessions of a name, the newest first."""
        statement = (
            select(
                SessionRow.id,
                SessionRow.attempt,
                SessionRow.state,
                SessionRow.training,
                SessionRow.reward,
                SessionRow.created_at,
            )
            .where(SessionRow.run_id == run_id, SessionRow.external_id == name)
            .order_by(SessionRow.attempt.desc(), SessionRow.created_at.desc(), SessionRow.id.desc())
            .limit(limit)
        )
        return list(self._connection.execute(statement).all())
