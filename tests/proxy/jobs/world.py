"""Jobs on a real store, with workers that tests start, and a clock that tests move."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from sqlalchemy import Connection, insert, select

from proxy.database.tables import EventRow, JobRow
from proxy.database.unit_of_work import Database
from proxy.jobs.kinds import JobKind, JobKinds, RunningJob
from proxy.jobs.leasing import find_due
from proxy.jobs.running import JobRunner, Outcome
from proxy.jobs.service import JobService
from proxy.jobs.sweeping import JobSweeper
from proxy.lifecycle.outbox import enqueue
from proxy.lifecycle.signals import Signals
from tests.proxy.store import MovedClock

LEASE_SECONDS = 30.0
SOON = 10.0
"""Bound on waiting for what should happen at once."""

Handler = Callable[[RunningJob], Awaitable[dict[str, Any] | None]]


def effect(job_id: str) -> Callable[[Connection], None]:
    """Return work that leaves an event, so that tests count how often it took effect."""

    def work(connection: Connection) -> None:
        connection.execute(insert(EventRow).values(kind="test.effect", data={"job": job_id}, created_at=0.0))

    return work


async def complete(job: RunningJob) -> None:
    """Handle a job by leaving an event."""
    await job.complete(effect(job.id))


class Seen:
    """An observer that collects outcomes."""

    def __init__(self) -> None:
        self.outcomes: list[str] = []

    def job_ended(self, *, kind: str, outcome: str, seconds: float) -> None:
        assert kind
        assert seconds >= 0
        self.outcomes.append(outcome)


class Jobs:
    """The jobs of a store."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.signals = Signals()
        self.clock = MovedClock()
        self.kinds = JobKinds()
        self.seen = Seen()
        self.service = JobService(database, self.kinds, self.signals, self.clock)
        self.sweeper = JobSweeper(database, self.kinds, self.signals, self.clock)

    def kind(self, name: str, handler: Handler = complete, **bounds: Any) -> JobKind:
        kind = JobKind(name=name, handler=handler, **{"timeout_seconds": SOON, **bounds})
        self.kinds.register(kind)
        return kind

    def runner(self, worker: str = "one", *, concurrency: int = 8, lease_seconds: float = LEASE_SECONDS) -> JobRunner:
        return JobRunner(
            self.database,
            self.kinds,
            self.signals,
            self.clock,
            worker=worker,
            concurrency=concurrency,
            lease_seconds=lease_seconds,
            observer=self.seen,
        )

    async def add(self, kind: str, *keys: str, **more: Any) -> list[str]:
        """Enqueue jobs with these keys; return their ids."""

        def work(connection: Connection) -> list[str]:
            now = self.clock()
            made = [enqueue(connection, kind=kind, key=key, payload={}, now=now, **more) for key in keys]
            return [job_id for job_id in made if job_id is not None]

        return await self.database.commit(work)

    async def run_due(self, runner: JobRunner, want: int = 100) -> list[Outcome]:
        """Run what is due now, once, and return how it ended."""
        found = await self.database.read(
            lambda connection: find_due(
                connection, self.kinds, before=self.clock(), want=want, last_runs=runner.last_runs
            )
        )
        leases = await runner.lease(found)
        return list(await asyncio.gather(*(runner.start(lease) for lease in leases)))

    async def row(self, job_id: str) -> Any:
        statement = select(*JobRow.__table__.columns).where(JobRow.id == job_id)
        return await self.database.read(lambda connection: connection.execute(statement).one())

    async def events(self, kind: str) -> list[dict[str, Any]]:
        statement = select(EventRow.data).where(EventRow.kind == kind).order_by(EventRow.id)
        return await self.database.read(lambda connection: list(connection.execute(statement).scalars()))

    async def effects(self) -> list[str]:
        """Return the jobs whose effect was committed, once for each time."""
        return [data["job"] for data in await self.events("test.effect")]


@asynccontextmanager
async def open_jobs(url: str) -> AsyncIterator[Jobs]:
    database = Database(url)
    try:
        yield Jobs(database)
    finally:
        await database.aclose()


async def until(condition: Callable[[], Awaitable[bool]], seconds: float = SOON) -> None:
    """Wait for a condition, and fail if it does not become true in time."""
    async with asyncio.timeout(seconds):
        while not await condition():
            await asyncio.sleep(0.01)
