"""Work that keeps jobs going whoever runs them: leases that passed, schedules, and the removal of old jobs."""

from __future__ import annotations

import asyncio
from functools import partial

from sqlalchemy import Connection

from proxy.clock import Clock
from proxy.database.unit_of_work import Database
from proxy.jobs.kinds import JobKind, JobKinds, RunningJob, Schedule
from proxy.jobs.leasing import expire_some
from proxy.jobs.repository import JobRepository
from proxy.lifecycle.outbox import enqueue
from proxy.lifecycle.signals import Signals
from proxy.log import logger
from proxy.settings import JobSettings

_HOUR = 3600.0
_DAY = 24 * _HOUR
# Rows that one transaction deletes, and the pause between two, in which other writes have their turn.
_DELETED_AT_ONCE = 500
_PAUSE_SECONDS = 0.05

_LOG = logger(__name__)


class JobSweeper:
    """Every proxy sweeps; each lease and each tick of a schedule is dealt with once."""

    def __init__(self, database: Database, kinds: JobKinds, signals: Signals, clock: Clock) -> None:
        self._database = database
        self._kinds = kinds
        self._signals = signals
        self._clock = clock
        self._ticks: dict[str, float] = {}

    async def sweep(self) -> None:
        """Fail attempts whose lease has passed, and enqueue jobs of schedules whose time has come."""
        now = self._clock()
        # A read first: most sweeps find nothing, and a write would wait for the disk.
        if await self._database.read(lambda connection: bool(JobRepository(connection).expired(now, 1))):
            for lease, state in await self._database.commit(partial(expire_some, kinds=self._kinds, now=now)):
                _LOG.warning("the lease of a job passed", job=lease.id, kind=lease.kind, state=state)
            self._signals.jobs.notify()
        for schedule in self._kinds.schedules:
            await self._tick(schedule, now)

    async def _tick(self, schedule: Schedule, now: float) -> None:
        tick = schedule.tick(now)
        if self._ticks.get(schedule.name) == tick:
            return
        if await self._database.commit(partial(_enqueue_tick, schedule, tick, now)):
            self._signals.jobs.notify()
        self._ticks[schedule.name] = tick


def _enqueue_tick(schedule: Schedule, tick: float, now: float, connection: Connection) -> bool:
    """Enqueue the job of a tick, unless another proxy did or an earlier job of the schedule is unfinished."""
    repository = JobRepository(connection)
    prefix = f"{schedule.name}@"
    if not repository.tick(schedule.name, tick):
        return False
    # The table of ticks prevents a second run, so the rows of earlier runs are there for people alone.
    repository.remove_done(schedule.kind, prefix, before=now - max(_HOUR, 10 * schedule.every_seconds))
    if repository.has_unfinished(schedule.kind, prefix):
        return False
    return enqueue(connection, kind=schedule.kind, key=f"{prefix}{tick:.0f}", payload={}, now=now) is not None


def cleaning(database: Database, settings: JobSettings, clock: Clock) -> tuple[JobKind, Schedule]:
    """Return the kind of job that removes old jobs, and its schedule."""

    async def clean(_job: RunningJob) -> dict[str, int]:
        removed = 0
        while True:
            now = clock()
            some = await database.commit(
                partial(
                    _remove_some,
                    finished_before=now - settings.keep_days * _DAY,
                    dead_before=now - settings.keep_dead_days * _DAY,
                )
            )
            removed += some
            if some < _DELETED_AT_ONCE:
                return {"removed": removed}
            await asyncio.sleep(_PAUSE_SECONDS)

    kind = JobKind(name="jobs.clean", handler=clean, concurrency=1)
    return kind, Schedule(name="jobs.clean", kind=kind.name, every_seconds=_HOUR)


def _remove_some(connection: Connection, *, finished_before: float, dead_before: float) -> int:
    return JobRepository(connection).remove_old(
        finished_before=finished_before, dead_before=dead_before, limit=_DELETED_AT_ONCE
    )
