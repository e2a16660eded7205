"""Jobs for operators: list, show, retry and cancel them, and figures by kind."""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec
from sqlalchemy import Connection

from proxy.clock import Clock
from proxy.contract.states import JobState
from proxy.database.unit_of_work import Database
from proxy.errors import Conflict, NotFound
from proxy.jobs.kinds import JobKinds
from proxy.jobs.view_repository import JobViewRepository
from proxy.lifecycle.events import append_event
from proxy.lifecycle.signals import Signals

# Jobs that one request retries; the answer says how many, and another request goes on.
_RETRIED_AT_ONCE = 1000


class JobView(msgspec.Struct, frozen=True, kw_only=True):
    """A job, as the API shows it. Times are seconds since the epoch."""

    id: str
    kind: str
    key: str
    run_id: str | None
    state: JobState
    attempts: int
    error: str | None
    result: dict[str, Any] | None
    payload: dict[str, Any]
    worker: str | None
    """The worker that runs the job."""
    due_at: float
    created_at: float
    started_at: float | None
    finished_at: float | None
    lease_until: float | None


class KindView(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of a kind: jobs by state, and for how long the one that has been due longest has been waiting.

    `concurrency` and `attempts` are null for a kind that this proxy does not know.
    """

    kind: str
    waiting: int
    running: int
    failed: int
    dead: int
    oldest_seconds: float
    concurrency: int | None
    attempts: int | None

    def counts(self) -> tuple[tuple[str, int], ...]:
        return tuple((state, getattr(self, state)) for state in ("waiting", "running", "failed", "dead"))


class ScheduleView(msgspec.Struct, frozen=True, kw_only=True):
    """A schedule: its kind, its interval, the last tick for which a job was due, and the next one."""

    name: str
    kind: str
    every_seconds: float
    last_at: float | None
    next_at: float


class JobService:
    """Reads and changes of jobs on request."""

    def __init__(self, database: Database, kinds: JobKinds, signals: Signals, clock: Clock) -> None:
        self._database = database
        self._kinds = kinds
        self._signals = signals
        self._clock = clock

    async def page(
        self,
        *,
        kind: str | None = None,
        state: JobState | None = None,
        run_id: str | None = None,
        below: str | None = None,
        limit: int = 50,
    ) -> list[JobView]:
        """Return jobs, newest first, with ids below `below`."""
        rows = await self._database.read(
            lambda connection: JobViewRepository(connection).page(
                kind=kind, state=state, run_id=run_id, below=below, limit=limit
            )
        )
        return [_view(row) for row in rows]

    async def show(self, job_id: str) -> JobView:
        """Return one job. Raise NotFound."""
        row = await self._database.read(lambda connection: JobViewRepository(connection).find(job_id))
        if row is None:
            raise NotFound(f"there is no job {job_id!r}; finished jobs are removed after some days", param="job_id")
        return _view(row)

    async def kinds(self) -> list[KindView]:
        """Return the figures of every kind that is known or has unfinished or dead jobs, by name."""
        now = self._clock()
        counts, oldest = await self._database.read(
            lambda connection: (JobViewRepository(connection).counts(), JobViewRepository(connection).oldest_due(now))
        )
        known = {kind.name: kind for kind in self._kinds}
        return [
            KindView(
                kind=name,
                waiting=counts.get((name, "waiting"), 0),
                running=counts.get((name, "running"), 0),
                failed=counts.get((name, "failed"), 0),
                dead=counts.get((name, "dead"), 0),
                oldest_seconds=max(0.0, now - oldest[name]) if name in oldest else 0.0,
                concurrency=known[name].concurrency if name in known else None,
                attempts=known[name].attempts if name in known else None,
            )
            for name in sorted({*known, *(name for name, _ in counts)})
        ]

    async def schedules(self) -> list[ScheduleView]:
        ticks = await self._database.read(lambda connection: JobViewRepository(connection).ticks())
        now = self._clock()
        return [
            ScheduleView(
                name=schedule.name,
                kind=schedule.kind,
                every_seconds=schedule.every_seconds,
                last_at=ticks.get(schedule.name),
                next_at=schedule.tick(now) + schedule.every_seconds,
            )
            for schedule in self._kinds.schedules
        ]

    async def retry(self, job_id: str) -> JobView:
        """Make a dead, cancelled or failed job due now, with all of its attempts. Raise NotFound and Conflict."""
        if not await self._retry([job_id]):
            job = await self.show(job_id)
            raise Conflict(f"job {job_id} is {job.state.value}: only dead, cancelled and failed jobs can be retried")
        return await self.show(job_id)

    async def retry_dead(self, *, kind: str | None, run_id: str | None) -> int:
        """Retry the dead jobs of a kind or run, up to a thousand. Return how many."""
        dead = await self.page(kind=kind, state=JobState.DEAD, run_id=run_id, limit=_RETRIED_AT_ONCE)
        return len(await self._retry([job.id for job in dead]))

    async def cancel(self, job_id: str) -> JobView:
        """Cancel a job that is not finished, or a dead one. Raise NotFound and Conflict.

        A running job is interrupted at its worker's next heartbeat. Its effect in the store is refused from now on;
        effects outside may have happened.
        """
        now = self._clock()

        def work(connection: Connection) -> bool:
            row = JobViewRepository(connection).cancel(job_id, now)
            if row is not None:
                data = {"job": job_id, "kind": row.kind, "key": row.key}
                append_event(connection, run_id=None, kind="job.cancelled", data=data, now=now)
            return row is not None

        if not await self._database.commit(work):
            job = await self.show(job_id)
            raise Conflict(f"job {job_id} is {job.state.value}: it cannot be cancelled any more")
        self._signals.events.notify()
        return await self.show(job_id)

    async def _retry(self, job_ids: list[str]) -> list[str]:
        if not job_ids:
            return []
        retried = await self._database.commit(partial(_retry, job_ids, self._clock()))
        if retried:
            self._signals.jobs.notify()
            self._signals.events.notify()
        return retried


def _retry(job_ids: list[str], now: float, connection: Connection) -> list[str]:
    rows = JobViewRepository(connection).retry(job_ids, now)
    for row in rows:
        data = {"job": row.id, "kind": row.kind, "key": row.key}
        append_event(connection, run_id=None, kind="job.retried", data=data, now=now)
    return [row.id for row in rows]


def _view(row: Any) -> JobView:
    return JobView(
        id=row.id,
        kind=row.kind,
        key=row.key,
        run_id=row.run_id or None,
        state=JobState(row.state),
        attempts=row.attempts,
        error=row.error,
        result=row.result,
        payload=row.payload,
        worker=None if row.owner is None else row.owner.rpartition(":")[0],
        due_at=row.due_at,
        created_at=row.created_at,
        started_at=row.started_at,
        finished_at=row.finished_at,
        lease_until=row.lease_until,
    )
