"""The worker of a process: it finds due jobs in the store, leases them and runs them."""

from __future__ import annotations

import asyncio

from sqlalchemy import Connection

from proxy.clock import Clock
from proxy.database.unit_of_work import Database
from proxy.errors import StoreUnavailable
from proxy.jobs.leasing import Found, find_due
from proxy.jobs.repository import JobRepository
from proxy.jobs.running import JobRunner
from proxy.lifecycle.signals import Signals
from proxy.log import logger

# Jobs that other processes enqueue, and those whose time comes, send no signal here.
_POLL_SECONDS = 1.0
# The pause after an unexpected error, so that it does not fill the log.
_ERROR_SECONDS = 5.0

CELERY_WORKER = "worker@"
"""How the names of `base-rl worker` processes begin."""

_LOG = logger(__name__)


class JobWorker:
    """Runs jobs that are due.

    With `late_seconds`, it takes only jobs that have been due for so long: it then stands in for messages that were
    lost. With `stands_in`, it does so only while no worker process is at work on any job.
    """

    def __init__(
        self,
        runner: JobRunner,
        database: Database,
        signals: Signals,
        clock: Clock,
        *,
        late_seconds: float = 0.0,
        stands_in: bool = False,
    ) -> None:
        self._runner = runner
        self._database = database
        self._signals = signals
        self._clock = clock
        self._late_seconds = late_seconds
        self._stands_in = stands_in
        self._is_standing_in = False

    async def run(self) -> None:
        """Run due jobs until cancelled; then give back those that are running."""
        heartbeats = asyncio.create_task(self._runner.heartbeats(), name="job heartbeats")
        try:
            while True:
                # Counted before the store is read, so that a job enqueued meanwhile is not waited for.
                since = self._signals.jobs.count
                try:
                    await self.take()
                except StoreUnavailable as error:
                    _LOG.warning("jobs wait for the store", error=error.message)
                except Exception:  # noqa: BLE001  (recorded, and the next round may do better)
                    _LOG.exception("jobs could not be taken")
                    await asyncio.sleep(_ERROR_SECONDS)
                await self._signals.jobs.wait(_POLL_SECONDS, since=since)
        finally:
            # The heartbeats last: a job that is being given back must not lose its lease.
            try:
                await self._runner.aclose()
            finally:
                heartbeats.cancel()

    async def take(self) -> int:
        """Lease and start as many due jobs as this process has places for. Return how many."""
        want = self._runner.free
        if want == 0:
            return 0
        found, is_worked_on = await self._database.read(lambda connection: self._find(connection, want))
        if not any(found.values()):
            return 0
        if self._stands_in:
            if not is_worked_on and not self._is_standing_in:
                _LOG.warning("no worker takes jobs: this proxy runs them until one does", waited=self._late_seconds)
            self._is_standing_in = not is_worked_on
            if is_worked_on:
                return 0
        leases = await self._runner.lease(found)
        for lease in leases:
            self._runner.start(lease)
        return len(leases)

    def _find(self, connection: Connection, want: int) -> tuple[Found, bool]:
        """Return due jobs, and whether a worker process is at work."""
        now = self._clock()
        found = find_due(
            connection,
            self._runner.kinds,
            before=now - self._late_seconds,
            want=want,
            last_runs=self._runner.last_runs,
        )
        return found, self._stands_in and JobRepository(connection).is_worked_on(f"{CELERY_WORKER}%", now)
