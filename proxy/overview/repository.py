"""The queries of runs: their state, figures, curves and events.

None counts or skips through turns: each is bounded by an index, by a limit, or by the number of sessions (`counted`
and `reward_buckets`, whose results are cached).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import (
    BigInteger,
    Connection,
    Select,
    cast,
    func,
    select,
    union_all,
)
from sqlalchemy.sql.base import ReadOnlyColumnCollection

from proxy.contract.states import ClaimState, TrainingState
from proxy.contract.trajectory import Purpose
from proxy.contract.turn import TurnState
from proxy.database.prepared import unindexed
from proxy.database.rows import AnyRow
from proxy.database.tables import (
    ClaimRow,
    EventRow,
    JudgementRow,
    RewardRow,
    SessionRow,
    TurnRow,
)
from proxy.lifecycle.lifecycle import is_open

_Columns = ReadOnlyColumnCollection[str, Any]

# A turn stores one float32 log-probability per output token.
_LOGPROB_BYTES = 4
# How many of the last ended sessions are searched for rewarded ones: without rewards a run would be walked whole.
_SEARCHED_FOR_REWARDS = 4096


class OverviewRepository:
    """Queries that run within one read transaction."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def _all(self, statement: Select[*tuple[Any, ...]]) -> Sequence[AnyRow]:
        return self._connection.execute(statement).all()

    # Runs

    def judge_scores(self, run_id: str, judge: str, *, limit: int) -> list[float]:
        """Return the newest scores of the judge, in the form that scored last, in order of arrival."""
        scored = (JudgementRow.run_id == run_id, JudgementRow.judge == judge, JudgementRow.reward_id.is_not(None))
        order = (JudgementRow.created_at.desc(), JudgementRow.id.desc())
        newest = select(JudgementRow.fingerprint, JudgementRow.score).where(*scored).order_by(*order).limit(limit)
        rows = self._connection.execute(newest).all()
        return [row.score for row in reversed(rows) if row.fingerprint == rows[0].fingerprint]

    def pause_reason(self, run_id: str) -> str | None:
        """Return the reason given for the run's last pause, or None."""
        statement = (
            select(EventRow.data)
            .where(EventRow.run_id == run_id, EventRow.kind == "run.paused")
            .order_by(EventRow.id.desc())
            .limit(1)
        )
        data = self._connection.execute(statement).scalar_one_or_none()
        return None if data is None else data.get("reason")

    def counted(self) -> Sequence[AnyRow]:
        """Count `sessions` and `turns` of all runs by `run_id` and `training`, with `last_active_at`. Walks all
        sessions."""
        statement = select(
            SessionRow.run_id,
            SessionRow.training,
            func.count().label("sessions"),
            func.sum(SessionRow.turn_count).label("turns"),
            func.max(SessionRow.last_active_at).label("last_active_at"),
        ).group_by(SessionRow.run_id, SessionRow.training)
        return self._all(statement)

    def open_sessions(self, run_id: str) -> int:
        statement = select(func.count()).where(is_open(), SessionRow.run_id == run_id)
        return int(self._connection.execute(statement).scalar_one())

    def last_rewards(self, run_id: str, count: int) -> list[tuple[str | None, float]]:
        """Return group and reward of the last ended and rewarded training sessions, newest first."""
        ended = (
            select(SessionRow.ended_at, SessionRow.reward, SessionRow.purpose, SessionRow.group_id)
            .where(SessionRow.run_id == run_id, SessionRow.ended_at.is_not(None))
            .order_by(SessionRow.ended_at.desc())
            .limit(_SEARCHED_FOR_REWARDS)
            .subquery()
        )
        statement = (
            select(ended.c.group_id, ended.c.reward)
            .where(ended.c.reward.is_not(None), ended.c.purpose == Purpose.TRAIN.value)
            .order_by(ended.c.ended_at.desc())
            .limit(count)
        )
        return [(row.group_id, row.reward) for row in self._all(statement)]

    def late_rewards(self, run_id: str) -> int:
        """Count the entries that arrived after training; a partial index contains only those."""
        statement = select(func.count()).where(RewardRow.run_id == run_id, RewardRow.after_training)
        return int(self._connection.execute(statement).scalar_one())

    def recent_turns(self, run_id: str, sessions: int) -> Sequence[AnyRow]:
        """Count `turns` by `continuation`, `attributed_by`, `finish_reason` and `state` in the last `sessions`
        sessions."""
        recent = (
            select(SessionRow.id)
            .where(SessionRow.run_id == run_id)
            .order_by(SessionRow.created_at.desc())
            .limit(sessions)
            .subquery()
        )
        kinds = (TurnRow.continuation, TurnRow.attributed_by, TurnRow.finish_reason, TurnRow.state)
        statement = (
            select(*kinds, func.count().label("turns"))
            .join(recent, recent.c.id == TurnRow.session_id)
            .where(TurnRow.state != TurnState.SHADOW.value)
            .group_by(*kinds)
        )
        return self._all(statement)

    def newest_turn(self, number: int) -> str | None:
        """Return the id of the turn, of any run, after which `number` turns began; None if there are fewer."""
        statement = select(TurnRow.id).order_by(TurnRow.id.desc()).offset(number).limit(1)
        return self._connection.execute(statement).scalar_one_or_none()

    def output_rate(self, run_id: str, *, begun: str, since: float, origin: float, width: float) -> dict[int, int]:
        """Sum the output tokens of turns that finished at `since` or later, by bucket of `width` seconds from
        `origin`.

        Visits the turns from the id `begun` on: ids are in the order in which turns began.
        """
        # Integers are divided alike by both databases; PostgreSQL rounds a fraction that is cast to an integer.
        milliseconds = cast((TurnRow.finished_at - origin) * 1000, BigInteger)
        bucket = milliseconds // cast(round(width * 1000), BigInteger)
        statement = (
            select(bucket, func.sum(func.length(TurnRow.output_logprobs)))
            .where(TurnRow.id >= begun, unindexed(TurnRow.run_id) == run_id, TurnRow.finished_at >= since)
            .group_by(bucket)
        )
        return {int(number): int(size) // _LOGPROB_BYTES for number, size in self._all(statement)}

    def trainer_marks(self, run_id: str) -> AnyRow | None:
        """Return the claim whose lease lasts longest: `state`, `created_at`, `lease_expires_at`."""
        # One query per state: the index is on run, state and lease, so each reads one row.
        newest = [
            select(ClaimRow.state, ClaimRow.created_at, ClaimRow.lease_expires_at)
            .where(ClaimRow.run_id == run_id, ClaimRow.state == state.value)
            .order_by(ClaimRow.lease_expires_at.desc())
            .limit(1)
            .subquery()
            .select()
            for state in ClaimState
        ]
        marks = union_all(*newest).subquery()
        statement = select(marks).order_by(marks.c.lease_expires_at.desc()).limit(1)
        return self._connection.execute(statement).first()

    def oldest_ready(self, run_id: str) -> float | None:
        """Return since when the longest-waiting trajectory has been claimable."""
        statement = select(func.min(SessionRow.ready_at)).where(
            SessionRow.run_id == run_id, SessionRow.training == TrainingState.READY.value
        )
        return self._connection.execute(statement).scalar_one()

    # Curves

    def reward_buckets(self, run_id: str, stride: int) -> Sequence[AnyRow]:
        """Return `sessions`, `at` and `total` reward of every `stride` rewarded training sessions in order of their
        end. Walks all sessions of the run."""
        number = func.row_number().over(order_by=(SessionRow.ended_at, SessionRow.id)) - 1
        numbered = (
            select(SessionRow.ended_at, SessionRow.reward, number.label("number"))
            .where(
                SessionRow.run_id == run_id,
                SessionRow.ended_at.is_not(None),
                SessionRow.reward.is_not(None),
                SessionRow.purpose == Purpose.TRAIN.value,
            )
            .subquery()
        )
        # `//` on two integers: both databases then divide to an integer.
        bucket = numbered.c.number // stride
        statement = (
            select(
                func.count().label("sessions"),
                func.max(numbered.c.ended_at).label("at"),
                func.sum(numbered.c.reward).label("total"),
            )
            .group_by(bucket)
            .order_by(bucket)
        )
        return self._all(statement)

    def events(self, run_id: str, *, after: int, limit: int) -> Sequence[AnyRow]:
        """Return the newest `limit` events after the id `after`, newest first."""
        statement = (
            select(EventRow.__table__)
            .where(EventRow.run_id == run_id, EventRow.id > after)
            .order_by(EventRow.id.desc())
            .limit(limit)
        )
        return self._all(statement)
