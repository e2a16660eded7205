"""Rows that judging reads and writes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, exists, func, insert, literal, select

from proxy.contract.states import RunState
from proxy.database.rows import AnyRow
from proxy.database.tables import JobRow, JudgementRow, RunRow, SessionRow
from proxy.lifecycle.judging import GIVEN_UP, JUDGING


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

    def totals(self, run_id: str) -> dict[str, dict[str, Any]]:
        """Return the figures of `JudgeView` by judge."""
        statement = select(
            JudgementRow.judge,
            func.count(JudgementRow.reward_id).label("scored"),
            (func.count() - func.count(JudgementRow.reward_id)).label("failed"),
            func.avg(JudgementRow.score).label("mean_score"),
            func.avg(JudgementRow.spread).label("spread"),
            func.sum(JudgementRow.prompt_tokens).label("prompt_tokens"),
            func.sum(JudgementRow.completion_tokens).label("completion_tokens"),
            func.sum(JudgementRow.cost).label("cost"),
        )
        rows = self._connection.execute(statement.where(JudgementRow.run_id == run_id).group_by(JudgementRow.judge))
        return {row["judge"]: {key: row[key] for key in row if key != "judge"} for row in rows.mappings()}

    def tokens_since(self, run_id: str, judge: str, since: float) -> int:
        """Return the tokens that the judge used in all attempts after `since`."""
        tokens = func.sum(JudgementRow.prompt_tokens + JudgementRow.completion_tokens)
        statement = select(func.coalesce(tokens, 0)).where(
            JudgementRow.run_id == run_id, JudgementRow.judge == judge, JudgementRow.created_at > since
        )
        return int(self._connection.execute(statement).scalar_one())

    def newest_error(self, run_id: str, judge: str) -> str | None:
        """Return why the judge's newest attempt failed; None if it did not."""
        statement = select(JudgementRow.error).where(JudgementRow.run_id == run_id, JudgementRow.judge == judge)
        newest = statement.order_by(JudgementRow.created_at.desc(), JudgementRow.id.desc()).limit(1)
        return self._connection.execute(newest).scalar_one_or_none()

    def unscored(
        self, run_id: str, judge: str, fingerprint: str, *, session_ids: Sequence[str] | None, limit: int
    ) -> list[str]:
        """Return ended sessions, the newest first, for which neither a score of this judge in this form nor a job of
        `enqueue_judging` with `again=fingerprint` exists."""
        scored = exists().where(
            JudgementRow.session_id == SessionRow.id,
            JudgementRow.judge == judge,
            JudgementRow.fingerprint == fingerprint,
            JudgementRow.reward_id.is_not(None),
        )
        asked = exists().where(
            JobRow.kind == JUDGING,
            JobRow.key == literal(f"{judge}:").concat(SessionRow.id).concat(f":{fingerprint}"),
        )
        statement = select(SessionRow.id).where(
            SessionRow.run_id == run_id,
            SessionRow.ended_at.is_not(None),
            SessionRow.erased_at.is_(None),
            SessionRow.turn_count > 0,
            func.coalesce(SessionRow.outcome, "").not_in(GIVEN_UP),
            ~scored,
            ~asked,
        )
        if session_ids is not None:
            statement = statement.where(SessionRow.id.in_(session_ids))
        return list(self._connection.execute(statement.order_by(SessionRow.ended_at.desc()).limit(limit)).scalars())

    def add(self, row: dict[str, Any]) -> None:
        self._connection.execute(insert(JudgementRow).values(row))
