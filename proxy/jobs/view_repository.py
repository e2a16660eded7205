"""Jobs as operators list and change them."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import Connection, func, null, select, text, update

from proxy.contract.states import JobState
from proxy.database.chunks import chunks
from proxy.database.rows import AnyRow
from proxy.database.tables import JobRow, JobScheduleRow
from proxy.jobs.repository import IS_PENDING, IS_RUNNING

_IS_DEAD = text("jobs.state = 'dead'")  # literally, for the partial index

_COLUMNS = (
    JobRow.id,
    JobRow.kind,
    JobRow.key,
    JobRow.run_id,
    JobRow.state,
    JobRow.attempts,
    JobRow.error,
    JobRow.result,
    JobRow.payload,
    JobRow.owner,
    JobRow.due_at,
    JobRow.created_at,
    JobRow.started_at,
    JobRow.finished_at,
    JobRow.lease_until,
)


class JobViewRepository:
    """Reads and writes within one transaction."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def page(
        self, *, kind: str | None, state: JobState | None, run_id: str | None, below: str | None, limit: int
    ) -> list[AnyRow]:
        """Return jobs in descending order of their ids, which is that of their creation."""
        statement = select(*_COLUMNS)
        if state is JobState.DEAD:
            statement = statement.where(_IS_DEAD)
        elif state is not None:
            statement = statement.where(JobRow.state == state.value)
        if kind is not None:
            statement = statement.where(JobRow.kind == kind)
        if run_id is not None:
            statement = statement.where(JobRow.run_id == run_id)
        if below is not None:
            statement = statement.where(JobRow.id < below)
        return list(self._connection.execute(statement.order_by(JobRow.id.desc()).limit(limit)).all())

    def find(self, job_id: str) -> AnyRow | None:
        return self._connection.execute(select(*_COLUMNS).where(JobRow.id == job_id)).first()

    def counts(self) -> dict[tuple[str, str], int]:
        """Count the jobs that are neither done nor cancelled, by kind and state."""
        found: dict[tuple[str, str], int] = {}
        # One statement for each partial index: together they would walk all rows, done ones included.
        for condition in (IS_PENDING, IS_RUNNING, _IS_DEAD):
            statement = select(JobRow.kind, JobRow.state, func.count()).where(condition)
            for kind, state, count in self._connection.execute(statement.group_by(JobRow.kind, JobRow.state)):
                found[kind, state] = count
        return found

    def oldest_due(self, now: float) -> dict[str, float]:
        """Return by kind since when the job that has been due longest is due; kinds without a due job are omitted."""
        statement = select(JobRow.kind, func.min(JobRow.due_at)).where(IS_PENDING, JobRow.due_at <= now)
        return dict(self._connection.execute(statement.group_by(JobRow.kind)).all())

    def ticks(self) -> dict[str, float]:
        """Return the last tick of every schedule that had one."""
        return dict(self._connection.execute(select(JobScheduleRow.name, JobScheduleRow.ticked_at)).all())

    def retry(self, job_ids: Sequence[str], now: float) -> list[AnyRow]:
        """Make the dead, cancelled and failed ones among these jobs due now, with all of their attempts."""
        states = [JobState.DEAD.value, JobState.CANCELLED.value, JobState.FAILED.value]
        values = {"state": JobState.WAITING.value, "attempts": 0, "due_at": now, "finished_at": null()}
        rows: list[AnyRow] = []
        for part in chunks(job_ids):
            statement = (
                update(JobRow)
                .where(JobRow.id.in_(part), JobRow.state.in_(states))
                .values(**values, dispatched_at=null())
                .returning(JobRow.id, JobRow.kind, JobRow.key)
            )
            rows += self._connection.execute(statement).all()
        return rows

    def cancel(self, job_id: str, now: float) -> AnyRow | None:
        """Cancel the job unless it is done or cancelled."""
        states = [JobState.DONE.value, JobState.CANCELLED.value]
        statement = (
            update(JobRow)
            .where(JobRow.id == job_id, JobRow.state.not_in(states))
            .values(
                state=JobState.CANCELLED.value,
                owner=null(),
                lease_until=null(),
                dispatched_at=null(),
                finished_at=now,
            )
            .returning(JobRow.kind, JobRow.key)
        )
        return self._connection.execute(statement).first()
