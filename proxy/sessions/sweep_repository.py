"""Rows of sessions that time has overtaken: idle, unrewarded, or rewarded anew after training."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import Connection, and_, func, or_, select, update

from proxy.contract.states import RunState, SessionState, TrainingState
from proxy.database.rows import AnyRow
from proxy.database.tables import RunRow, SessionRow
from proxy.lifecycle.lifecycle import is_open


class SweepRepository:
    """Reads and writes of the sweep, on the connection of one transaction."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def runs_to_sweep(self, *, idle_seconds: float, ended_before: float, now: float) -> set[str]:
        """Return the ids of runs that may have idle or unrewarded sessions.

        `idle_seconds` is the shortest idle time of any run. Sessions of some run expire if they ended before
        `ended_before` without a reward, those of other runs later. So runs that are not returned have nothing to
        sweep, and a run that is returned may have nothing either.
        """
        of_run = SessionRow.run_id == RunRow.id
        idle_at = SessionRow.last_active_at + func.coalesce(SessionRow.idle_seconds, idle_seconds)
        idle = select(SessionRow.id).where(is_open(), of_run, idle_at <= now)
        unrewarded = select(SessionRow.id).where(
            and_(of_run, SessionRow.training == TrainingState.PENDING.value),
            and_(SessionRow.state == SessionState.ENDED.value, SessionRow.ended_at <= ended_before),
        )
        # Subqueries per run, because the indexes of sessions begin with the run.
        statement = select(RunRow.id).where(or_(idle.exists(), unrewarded.exists()))
        return set(self._connection.execute(statement).scalars())

    def idle(self, *, run_id: str, default_seconds: float, now: float, limit: int) -> list[str]:
        """Return open sessions that had no call for their idle time, longest silent first."""
        idle_at = SessionRow.last_active_at + func.coalesce(SessionRow.idle_seconds, default_seconds)
        statement = (
            select(SessionRow.id)
            .where(is_open(), SessionRow.run_id == run_id, idle_at <= now)
            .order_by(SessionRow.last_active_at)
            .limit(limit)
        )
        return list(self._connection.execute(statement).scalars())

    def unrewarded(self, *, run_id: str, ended_before: float, limit: int) -> list[str]:
        """Return sessions that ended before that time and still wait for a reward."""
        statement = (
            select(SessionRow.id)
            .where(
                and_(SessionRow.run_id == run_id, SessionRow.training == TrainingState.PENDING.value),
                and_(SessionRow.state == SessionState.ENDED.value, SessionRow.ended_at <= ended_before),
            )
            .limit(limit)
        )
        return list(self._connection.execute(statement).scalars())

    def expire(self, session_ids: Sequence[str]) -> int:
        result = self._connection.execute(
            update(SessionRow)
            .where(SessionRow.id.in_(session_ids), SessionRow.training == TrainingState.PENDING.value)
            .values(training=TrainingState.EXPIRED.value)
        )
        return result.rowcount

    def count_revised(self) -> list[AnyRow]:
        revised = (
            select(func.count())
            .where(SessionRow.run_id == RunRow.id, SessionRow.revised_at.is_not(None))
            .correlate(RunRow)
            .scalar_subquery()
        )
        statement = select(RunRow.name, revised.label("sessions")).where(RunRow.state != RunState.DELETED.value)
        return list(self._connection.execute(statement).all())
