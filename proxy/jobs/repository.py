"""Rows of jobs: finding, leasing and ending them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, Text, and_, cast, delete, func, null, or_, select, text, update
from sqlalchemy.dialects import postgresql, sqlite

from proxy.contract.states import JobState
from proxy.database.tables import JobRow, JobScheduleRow, RunRow
from proxy.jobs.lease import Lease

# The conditions of the partial indexes, word for word: SQLite uses an index only then, and never for a parameter.
IS_PENDING = text("jobs.state IN ('waiting', 'failed')")
IS_RUNNING = text("jobs.state = 'running'")

# Runs that one search considers; further ones have their turn when some of these have no job left.
_MOST_RUNS = 1000
# PostgreSQL's advisory locks of two numbers: this one, "jobs" in ASCII, and a hash of the kind.
_KIND_LOCK = 0x6A6F_6273
# Most characters of an error that are stored.
_ERROR_CHARACTERS = 2000


class JobRepository:
    """Reads and writes within one transaction."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    # Finding due jobs

    def runs_waiting(self, kind: str) -> list[str]:
        """Return the runs that have pending jobs of the kind, due or not, in the order of their ids."""
        # A loose scan: one look-up in the index for each run, however many jobs each has.
        rows = self._connection.execute(_RUNS_WAITING, {"kind": kind, "most": _MOST_RUNS})
        return list(rows.scalars())

    def due(
        self, kind: str, run_id: str, *, before: float, limit: int, sent_before: float | None = None
    ) -> list[str]:
        """Return pending jobs of a kind and run that were due at `before`, the longest due first.

        With `sent_before`, omit those whose ids were sent to the broker since then.
        """
        statement = select(JobRow.id).where(
            JobRow.kind == kind, JobRow.run_id == run_id, IS_PENDING, JobRow.due_at <= before
        )
        if sent_before is not None:
            statement = statement.where(or_(JobRow.dispatched_at.is_(None), JobRow.dispatched_at < sent_before))
        statement = statement.order_by(JobRow.due_at, JobRow.id).limit(limit)
        return list(self._connection.execute(statement).scalars())

    def busy(self, kind: str, *, sent_since: float | None = None) -> dict[str, int]:
        """Count the running jobs of a kind by run; with `sent_since`, also those sent to the broker since then."""
        counts: dict[str, int] = {}
        conditions = [and_(JobRow.kind == kind, IS_RUNNING)]
        if sent_since is not None:
            conditions.append(and_(JobRow.kind == kind, IS_PENDING, JobRow.dispatched_at >= sent_since))
        for condition in conditions:
            statement = select(JobRow.run_id, func.count()).where(condition).group_by(JobRow.run_id)
            for run_id, count in self._connection.execute(statement):
                counts[run_id] = counts.get(run_id, 0) + count
        return counts

    def kind_of(self, job_id: str) -> str | None:
        return self._connection.execute(select(JobRow.kind).where(JobRow.id == job_id)).scalar_one_or_none()

    def is_worked_on(self, owners_like: str, now: float) -> bool:
        """Return whether a worker whose name matches the pattern holds a lease that has not passed."""
        statement = select(JobRow.id).where(IS_RUNNING, JobRow.owner.like(owners_like), JobRow.lease_until > now)
        return self._connection.execute(statement.limit(1)).first() is not None

    # Leases

    def lock_kind(self, kind: str) -> None:
        """Let no other transaction lease jobs of this kind until this one ends."""
        # Otherwise two transactions that count the running jobs at the same time would both lease the last place.
        # SQLite has one writer at a time.
        if self._connection.dialect.name == "postgresql":
            lock = func.pg_advisory_xact_lock(_KIND_LOCK, func.hashtext(cast(kind, Text)))
            self._connection.execute(select(lock)).close()

    def lease(self, job_ids: Sequence[str], *, owner: str, until: float, now: float) -> list[Lease]:
        """Lease those of the jobs that are pending and due."""
        statement = (
            update(JobRow)
            .where(JobRow.id.in_(job_ids), IS_PENDING, JobRow.due_at <= now)
            .values(
                state=JobState.RUNNING.value,
                owner=owner,
                lease_until=until,
                attempts=JobRow.attempts + 1,
                started_at=now,
                dispatched_at=null(),
            )
            .returning(JobRow.id, JobRow.kind, JobRow.key, JobRow.payload, JobRow.run_id, JobRow.attempts)
        )
        return [
            Lease(
                id=row.id,
                kind=row.kind,
                key=row.key,
                payload=row.payload,
                run_id=row.run_id or None,
                attempt=row.attempts,
                owner=owner,
            )
            for row in self._connection.execute(statement)
        ]

    def extend(self, job_ids: Sequence[str], owners: Collection[str], *, until: float) -> set[str]:
        """Extend the leases that these owners still have, and return the ids of their jobs."""
        statement = (
            update(JobRow)
            .where(JobRow.id.in_(job_ids), JobRow.owner.in_(owners), IS_RUNNING)
            .values(lease_until=until)
            .returning(JobRow.id)
        )
        return set(self._connection.execute(statement).scalars())

    def expired(self, now: float, limit: int) -> list[Lease]:
        """Return jobs whose lease has passed."""
        columns = (JobRow.id, JobRow.kind, JobRow.key, JobRow.run_id, JobRow.attempts, JobRow.owner)
        statement = select(*columns).where(IS_RUNNING, JobRow.lease_until < now).order_by(JobRow.id).limit(limit)
        return [
            Lease(
                id=row.id,
                kind=row.kind,
                key=row.key,
                payload={},
                run_id=row.run_id or None,
                attempt=row.attempts,
                owner=row.owner,
            )
            for row in self._connection.execute(statement)
        ]

    # The end of an attempt; each returns False if the lease is no longer the owner's

    def complete(self, lease: Lease, *, result: dict[str, Any] | None, now: float) -> bool:
        values = {"result": result, "error": None, "finished_at": now}
        return self._end(lease, JobState.DONE, values)

    def fail(self, lease: Lease, *, error: str, due_at: float, now: float, expired_by: float | None = None) -> bool:
        """Record a failed attempt, after which another one follows at `due_at`.

        With `expired_by`, only if the lease passed before then: its owner may have extended it meanwhile.
        """
        values = {"error": error[:_ERROR_CHARACTERS], "due_at": due_at}
        return self._end(lease, JobState.FAILED, values, expired_by=expired_by)

    def bury(self, lease: Lease, *, error: str, now: float, expired_by: float | None = None) -> bool:
        """Record the last failed attempt."""
        values = {"error": error[:_ERROR_CHARACTERS], "finished_at": now}
        return self._end(lease, JobState.DEAD, values, expired_by=expired_by)

    def give_back(self, lease: Lease, *, due_at: float, reason: str | None = None) -> bool:
        """End an attempt that does not count."""
        values: dict[str, Any] = {"due_at": due_at, "attempts": JobRow.attempts - 1}
        if reason is not None:
            values["error"] = reason[:_ERROR_CHARACTERS]
        return self._end(lease, JobState.WAITING, values)

    def _end(
        self, lease: Lease, state: JobState, values: Mapping[str, Any], *, expired_by: float | None = None
    ) -> bool:
        statement = update(JobRow).where(JobRow.id == lease.id, IS_RUNNING, JobRow.owner == lease.owner)
        if expired_by is not None:
            statement = statement.where(JobRow.lease_until < expired_by)
        ended = statement.values(state=state.value, owner=null(), lease_until=null(), **values)
        return self._connection.execute(ended).rowcount == 1

    def run_exists(self, run_id: str) -> bool:
        return self._connection.execute(select(RunRow.id).where(RunRow.id == run_id)).first() is not None

    # The broker

    def mark_sent(self, job_ids: Sequence[str], *, now: float, sent_before: float) -> list[str]:
        """Mark the jobs as sent to the broker, and return those that no other proxy marked since `sent_before`."""
        statement = (
            update(JobRow)
            .where(
                JobRow.id.in_(job_ids),
                IS_PENDING,
                or_(JobRow.dispatched_at.is_(None), JobRow.dispatched_at < sent_before),
            )
            .values(dispatched_at=now)
            .returning(JobRow.id)
        )
        marked = set(self._connection.execute(statement).scalars())
        return [job_id for job_id in job_ids if job_id in marked]

    def unmark_sent(self, job_ids: Sequence[str]) -> None:
        statement = update(JobRow).where(JobRow.id.in_(job_ids), IS_PENDING).values(dispatched_at=null())
        self._connection.execute(statement)

    # Schedules

    def tick(self, name: str, at: float) -> bool:
        """Record a tick, and return whether it is later than the last one that was recorded, by any proxy."""
        insert = postgresql.insert if self._connection.dialect.name == "postgresql" else sqlite.insert
        new = insert(JobScheduleRow).values(name=name, ticked_at=at)
        statement = new.on_conflict_do_update(
            index_elements=["name"],
            set_={"ticked_at": new.excluded.ticked_at},
            where=JobScheduleRow.ticked_at < new.excluded.ticked_at,
        )
        return self._connection.execute(statement.returning(JobScheduleRow.name)).first() is not None

    def has_unfinished(self, kind: str, key_prefix: str) -> bool:
        """Return whether a job of the kind whose key begins with `key_prefix` is pending or running."""
        begins = func.substr(JobRow.key, 1, len(key_prefix)) == key_prefix
        for condition in (IS_PENDING, IS_RUNNING):
            statement = select(JobRow.id).where(JobRow.kind == kind, condition, begins).limit(1)
            if self._connection.execute(statement).first() is not None:
                return True
        return False

    # Removal

    def remove_done(self, kind: str, key_prefix: str, *, before: float) -> None:
        """Remove done jobs of a kind whose key begins with `key_prefix` and that finished earlier."""
        # A range, because the index on the key serves it.
        keys = and_(JobRow.key >= key_prefix, JobRow.key < f"{key_prefix}~")
        statement = delete(JobRow).where(JobRow.kind == kind, keys, JobRow.state == JobState.DONE.value)
        self._connection.execute(statement.where(JobRow.finished_at < before))

    def remove_old(self, *, finished_before: float, dead_before: float, limit: int) -> int:
        """Remove up to `limit` done and cancelled jobs that finished before the one time, and dead ones before the
        other. Return how many."""
        old = or_(
            JobRow.state.in_([JobState.DONE.value, JobState.CANCELLED.value])
            & (JobRow.finished_at < finished_before),
            (JobRow.state == JobState.DEAD.value) & (JobRow.finished_at < dead_before),
        )
        # The first condition is the one that the index on `finished_at` serves.
        least = JobRow.finished_at < max(finished_before, dead_before)
        some = select(JobRow.id).where(JobRow.finished_at.is_not(None), least, old).limit(limit)
        return self._connection.execute(delete(JobRow).where(JobRow.id.in_(some))).rowcount


_RUNS_WAITING = text(
    """
    WITH RECURSIVE runs (run_id) AS (
        SELECT min(run_id) FROM jobs WHERE kind = :kind AND state IN ('waiting', 'failed')
        UNION ALL
        SELECT (SELECT min(jobs.run_id) FROM jobs
                WHERE jobs.kind = :kind AND jobs.state IN ('waiting', 'failed') AND jobs.run_id > runs.run_id)
        FROM runs WHERE runs.run_id IS NOT NULL
    )
    SELECT run_id FROM runs WHERE run_id IS NOT NULL LIMIT :most
    """
)
