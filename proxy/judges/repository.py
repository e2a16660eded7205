"""Rows that judging reads and writes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, exists, func, insert, literal, select
from sqlalchemy.orm import aliased

from proxy.contract.states import JobState, RunState
from proxy.database.rows import AnyRow
from proxy.database.tables import AnswerPairRow, GroupRow, JobRow, JudgementRow, RewardRow, RunRow, SessionRow
from proxy.judges.groups import Member
from proxy.lifecycle.judging import GIVEN_UP, JUDGING
from proxy.lifecycle.outbox import NO_SUCCESS


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

    def is_judged(self, session_id: str, judge: str, fingerprint: str, digest: str) -> bool:
        """Return whether the judge, in this form, has an answer about this content: a reward, or that it has none."""
        statement = select(JudgementRow.id).where(
            JudgementRow.session_id == session_id,
            JudgementRow.judge == judge,
            JudgementRow.fingerprint == fingerprint,
            JudgementRow.digest == digest,
            JudgementRow.error.is_(None),
        )
        return self._connection.execute(statement.limit(1)).first() is not None

    def group_of(self, session_id: str) -> list[Member]:
        """Return all sessions of the session's group; none if it belongs to no group."""
        group = select(SessionRow.group_id).where(SessionRow.id == session_id).scalar_subquery()
        columns = [GroupRow.size if name == "size" else getattr(SessionRow, name) for name in Member._fields]
        statement = select(*columns).join(GroupRow, GroupRow.id == SessionRow.group_id)
        return [Member(*row) for row in self._connection.execute(statement.where(SessionRow.group_id == group))]

    def first_job(self, judge: str, session_ids: Sequence[str], *, mark: str) -> str | None:
        """Return the last of the sessions that has an unfinished job of this judge and mark."""
        keys = {f"{judge}:{session_id}{mark}": session_id for session_id in session_ids}
        statement = select(JobRow.key).where(
            JobRow.kind == JUDGING,
            JobRow.key.in_(keys),
            JobRow.state.in_((JobState.WAITING.value, JobState.RUNNING.value, JobState.FAILED.value)),
        )
        found = {keys[key] for key in self._connection.execute(statement).scalars()}
        return next((session_id for session_id in reversed(session_ids) if session_id in found), None)

    def pairs(
        self, run_id: str, judge: str, source: str, fingerprint: str, *, limit: int
    ) -> list[tuple[float, float]]:
        """Return the newest scores of the judge in this form, the newest first, each with the newest reward of
        `source` about the same session or turn."""
        people = aliased(RewardRow)
        newest = (
            select(people.value)
            .where(
                people.session_id == JudgementRow.session_id,
                people.source == source,
                func.coalesce(people.turn_id, "") == func.coalesce(JudgementRow.turn_id, ""),
            )
            .order_by(people.sequence.desc())
            .limit(1)
            .correlate(JudgementRow)
            .scalar_subquery()
        )
        scored = (
            select(JudgementRow.score, newest.label("people"))
            .where(
                JudgementRow.run_id == run_id,
                JudgementRow.judge == judge,
                JudgementRow.fingerprint == fingerprint,
                JudgementRow.reward_id.is_not(None),
            )
            .order_by(JudgementRow.created_at.desc())
            .limit(limit)
            .subquery()
        )
        found = self._connection.execute(select(scored.c.score, scored.c.people).where(scored.c.people.is_not(None)))
        return [(score, value) for score, value in found]

    def next_source(self, run_id: str, after: str) -> str | None:
        """Return the first source of the run's rewards after `after`, in the order of the database."""
        statement = select(func.min(RewardRow.source)).where(RewardRow.run_id == run_id, RewardRow.source > after)
        return self._connection.execute(statement).scalar_one_or_none()

    def scores(self, run_id: str, judge: str, fingerprint: str, *, limit: int) -> list[float]:
        """Return the newest scores of the judge in this form, in order of arrival."""
        statement = select(JudgementRow.score).where(
            JudgementRow.run_id == run_id,
            JudgementRow.judge == judge,
            JudgementRow.fingerprint == fingerprint,
            JudgementRow.reward_id.is_not(None),
        )
        newest = statement.order_by(JudgementRow.created_at.desc(), JudgementRow.id.desc()).limit(limit)
        return [score for score in self._connection.execute(newest).scalars() if score is not None][::-1]

    def totals(self, run_id: str) -> dict[str, dict[str, Any]]:
        """Return the figures of `JudgeView` by judge, with what its comparisons for gates have used."""
        statement = select(
            JudgementRow.judge,
            func.count(JudgementRow.reward_id).label("scored"),
            func.count(JudgementRow.error).label("failed"),
            (func.count() - func.count(JudgementRow.reward_id) - func.count(JudgementRow.error)).label("abstained"),
            func.avg(JudgementRow.score).label("mean_score"),
            func.avg(JudgementRow.spread).label("spread"),
            func.sum(JudgementRow.prompt_tokens).label("prompt_tokens"),
            func.sum(JudgementRow.completion_tokens).label("completion_tokens"),
            func.sum(JudgementRow.cost).label("cost"),
        )
        rows = self._connection.execute(statement.where(JudgementRow.run_id == run_id).group_by(JudgementRow.judge))
        found = {row["judge"]: {key: row[key] for key in row if key != "judge"} for row in rows.mappings()}
        for row in self._connection.execute(_COMPARED.where(AnswerPairRow.run_id == run_id)).mappings():
            figures = found.setdefault(row["judge"], {})
            figures["compared"] = row["compared"]
            for name in ("prompt_tokens", "completion_tokens"):
                figures[name] = (figures.get(name) or 0) + row[name]
            costs = [cost for cost in (figures.get("cost"), row["cost"]) if cost is not None]
            figures["cost"] = sum(costs) if costs else None
        return found

    def tokens_since(self, run_id: str, judge: str, since: float) -> int:
        """Return the tokens that the judge used in all attempts after `since`. All tokens of a pair of answers count
        as used in the newest attempt at it."""
        tokens = func.sum(JudgementRow.prompt_tokens + JudgementRow.completion_tokens)
        judged = select(func.coalesce(tokens, 0)).where(
            JudgementRow.run_id == run_id, JudgementRow.judge == judge, JudgementRow.created_at > since
        )
        tokens = func.sum(AnswerPairRow.prompt_tokens + AnswerPairRow.completion_tokens)
        compared = select(func.coalesce(tokens, 0)).where(
            AnswerPairRow.run_id == run_id, AnswerPairRow.judge == judge, AnswerPairRow.judged_at > since
        )
        return sum(int(self._connection.execute(each).scalar_one()) for each in (judged, compared))

    def newest_error(self, run_id: str, judge: str) -> str | None:
        """Return why the judge's newest attempt failed; None if it did not."""
        statement = select(JudgementRow.error).where(JudgementRow.run_id == run_id, JudgementRow.judge == judge)
        newest = statement.order_by(JudgementRow.created_at.desc(), JudgementRow.id.desc()).limit(1)
        return self._connection.execute(newest).scalar_one_or_none()

    def unscored(
        self, run_id: str, judge: str, fingerprint: str, *, session_ids: Sequence[str] | None, limit: int
    ) -> list[str]:
        """Return ended sessions, the newest first, for which neither an answer of this judge in this form nor a job
        of `enqueue_judging` with `again=fingerprint` exists that is not dead or cancelled."""
        scored = exists().where(
            JudgementRow.session_id == SessionRow.id,
            JudgementRow.judge == judge,
            JudgementRow.fingerprint == fingerprint,
            JudgementRow.error.is_(None),
        )
        asked = exists().where(
            JobRow.kind == JUDGING,
            JobRow.key == literal(f"{judge}:").concat(SessionRow.id).concat(f":{fingerprint}"),
            JobRow.state.not_in(NO_SUCCESS),
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


_COMPARED = (
    select(
        AnswerPairRow.judge,
        func.count(AnswerPairRow.preference).label("compared"),
        func.sum(AnswerPairRow.prompt_tokens).label("prompt_tokens"),
        func.sum(AnswerPairRow.completion_tokens).label("completion_tokens"),
        func.sum(AnswerPairRow.cost).label("cost"),
    )
    .where(AnswerPairRow.judge.is_not(None))
    .group_by(AnswerPairRow.judge)
)
