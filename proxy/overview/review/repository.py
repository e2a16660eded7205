"""Queries of the review queue and of what a session can be compared with."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import Connection, and_, exists, or_, select

from proxy.contract.arrays import unpack_logprobs
from proxy.contract.turn import TurnState
from proxy.database.rows import AnyRow
from proxy.database.tables import (
    FeedbackTextRow,
    JudgementRow,
    PreferenceRow,
    RewardRow,
    SessionRow,
    TurnRow,
)


class ReviewRepository:
    """Queries that run within one read transaction."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def unreviewed(self, run_id: str, reviewers: str, limit: int) -> Sequence[AnyRow]:
        """Return `id`, `task`, `reward` and `ended_at` of those of the run's `limit` last ended sessions that have
        turns and nothing from a source that begins with `reviewers`, the newest first."""
        recent = (
            select(SessionRow.id, SessionRow.task, SessionRow.reward, SessionRow.ended_at)
            .where(
                SessionRow.run_id == run_id,
                SessionRow.ended_at.is_not(None),
                SessionRow.erased_at.is_(None),
                SessionRow.turn_count > 0,
            )
            .order_by(SessionRow.ended_at.desc())
            .limit(limit)
            .subquery()
        )
        by_reviewers = [
            exists().where(table.session_id == recent.c.id, table.source.startswith(reviewers, autoescape=True))
            for table in (RewardRow, FeedbackTextRow)
        ]
        preferred = exists().where(
            or_(PreferenceRow.chosen_session_id == recent.c.id, PreferenceRow.rejected_session_id == recent.c.id),
            PreferenceRow.source.startswith(reviewers, autoescape=True),
        )
        statement = select(recent).where(*(~each for each in (*by_reviewers, preferred)))
        return self._connection.execute(statement.order_by(recent.c.ended_at.desc())).all()

    def spreads(self, session_ids: Sequence[str]) -> dict[str, tuple[str, float]]:
        """Return the judge with the largest spread between its votes, and the spread, by session."""
        statement = select(JudgementRow.session_id, JudgementRow.judge, JudgementRow.spread).where(
            JudgementRow.session_id.in_(session_ids), JudgementRow.reward_id.is_not(None), JudgementRow.spread > 0
        )
        found: dict[str, tuple[str, float]] = {}
        for session_id, judge, spread in self._connection.execute(statement.order_by(JudgementRow.spread)):
            found[session_id] = (judge, spread or 0.0)
        return found

    def logprobs(self, session_ids: Sequence[str]) -> dict[str, float]:
        """Return the mean log-probability of the tokens of answers, by session; sessions without tokens are
        omitted."""
        statement = select(TurnRow.session_id, TurnRow.output_logprobs).where(
            TurnRow.session_id.in_(session_ids), TurnRow.state != TurnState.SHADOW.value
        )
        sums: dict[str, tuple[float, int]] = {}
        for session_id, packed in self._connection.execute(statement):
            logprobs = unpack_logprobs(packed)
            total, count = sums.get(session_id, (0.0, 0))
            sums[session_id] = (total + sum(logprobs), count + len(logprobs))
        return {session_id: total / count for session_id, (total, count) in sums.items() if count}

    def others(self, session_id: str, limit: int) -> Sequence[AnyRow]:
        """Return `id`, `task`, `reward` and `ended_at` of ended sessions of the same group, or with the same task or
        first message, the newest first."""
        own = self._connection.execute(
            select(SessionRow.run_id, SessionRow.group_id, SessionRow.task, SessionRow.first_message).where(
                SessionRow.id == session_id
            )
        ).one()
        alike = [
            getattr(SessionRow, name) == getattr(own, name)
            for name in ("group_id", "task", "first_message")
            if getattr(own, name) is not None
        ]
        if not alike:
            return ()
        # The newest sessions alone: tasks and first messages have no index.
        recent = (
            select(SessionRow.id)
            .where(SessionRow.run_id == own.run_id, SessionRow.ended_at.is_not(None))
            .order_by(SessionRow.ended_at.desc())
            .limit(_SEARCHED)
            .subquery()
        )
        return self._connection.execute(
            select(SessionRow.id, SessionRow.task, SessionRow.reward, SessionRow.ended_at)
            .join(recent, recent.c.id == SessionRow.id)
            .where(and_(SessionRow.id != session_id, SessionRow.erased_at.is_(None)), or_(*alike))
            .order_by(SessionRow.ended_at.desc())
            .limit(limit)
        ).all()


_SEARCHED = 4096
