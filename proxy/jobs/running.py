"""Running leased jobs: their handlers, time-outs and heartbeats, and the end of every attempt."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from enum import StrEnum
from typing import Protocol, TypeVar

from sqlalchemy import Connection

from proxy.clock import Clock
from proxy.database.unit_of_work import Database
from proxy.errors import StoreUnavailable
from proxy.jobs.kinds import JobFailure, JobKind, JobKinds, JobPostponed, JobRefused, Json, LeaseLost
from proxy.jobs.lease import Lease
from proxy.jobs.leasing import Found, lease_found, record_failure
from proxy.jobs.repository import JobRepository
from proxy.lifecycle.signals import Signals
from proxy.log import logger

_LOG = logger(__name__)

_Result = TypeVar("_Result")


class Outcome(StrEnum):
    """How an attempt ended.

    `failed`: another attempt follows. `dead`: none follows. `postponed` and `returned` do not count as attempts; a
    job is returned when its worker stops. `lost`: the job was cancelled or another worker has it.
    """

    DONE = "done"
    FAILED = "failed"
    DEAD = "dead"
    POSTPONED = "postponed"
    RETURNED = "returned"
    LOST = "lost"


class JobObserver(Protocol):
    """Receives the ends of attempts, for metrics. It must neither raise nor block."""

    def job_ended(self, *, kind: str, outcome: str, seconds: float) -> None: ...


class JobRunner:
    """Runs up to `concurrency` leased jobs of this process at the same time.

    `worker` is the process's name, as leases show it. `heartbeats` extends leases and must run all the time: a job
    may take longer than its lease.
    """

    def __init__(
        self,
        database: Database,
        kinds: JobKinds,
        signals: Signals,
        clock: Clock,
        *,
        worker: str,
        concurrency: int,
        lease_seconds: float,
        observer: JobObserver | None = None,
    ) -> None:
        self.kinds = kinds
        self._database = database
        self._signals = signals
        self._clock = clock
        self._worker = worker
        self._concurrency = concurrency
        self._lease_seconds = lease_seconds
        self._observer = observer
        self._attempts: dict[str, _Attempt] = {}
        self.last_runs: dict[str, str] = {}
        """The run whose job was leased first the last time, by kind."""

    @property
    def free(self) -> int:
        """How many more jobs this process may run now."""
        return max(0, self._concurrency - len(self._attempts))

    async def lease(self, found: Found) -> list[Lease]:
        """Lease found jobs. Run each of them at once (`start` or `run`), or it stays leased in vain."""

        def work(connection: Connection) -> tuple[list[Lease], dict[str, str]]:
            last_runs: dict[str, str] = {}
            leases = lease_found(
                connection,
                self.kinds,
                found,
                worker=self._worker,
                seconds=self._lease_seconds,
                now=self._clock(),
                last_runs=last_runs,
            )
            return leases, last_runs

        leases, last_runs = await self._database.commit(work)
        self.last_runs.update(last_runs)
        return leases

    def start(self, lease: Lease) -> asyncio.Task[Outcome]:
        """Run a leased job in a task of its own."""
        attempt = _Attempt(self._database, self._clock, lease)
        attempt.task = asyncio.get_running_loop().create_task(self._run(attempt), name=f"job {lease.id}")
        self._attempts[lease.id] = attempt
        return attempt.task

    async def heartbeats(self) -> None:
        """Extend the leases of the running jobs, and cancel jobs that are no longer this process's. Never return."""
        # Three heartbeats a lease: two may fail, for example while the database restarts.
        pause = self._lease_seconds / 3
        while True:
            await asyncio.sleep(pause)
            with suppress(StoreUnavailable):  # the leases may pass meanwhile; completing a job asks for its owner
                await self._extend()

    async def aclose(self) -> None:
        """Cancel all jobs and give them back, so that another worker has them at once."""
        tasks = [attempt.task for attempt in self._attempts.values() if attempt.task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _extend(self) -> None:
        attempts = list(self._attempts.values())
        if not attempts:
            return
        job_ids = [attempt.lease.id for attempt in attempts]
        owners = {attempt.lease.owner for attempt in attempts}
        until = self._clock() + self._lease_seconds
        mine = await self._database.commit(
            lambda connection: JobRepository(connection).extend(job_ids, owners, until=until)
        )
        for attempt in attempts:
            # A job that was completed while the leases were extended has no lease either.
            if attempt.lease.id not in mine and not attempt.is_complete:
                attempt.is_lost = True
                if attempt.task is not None:
                    attempt.task.cancel()

    async def _run(self, attempt: _Attempt) -> Outcome:
        lease, kind = attempt.lease, self.kinds[attempt.lease.kind]
        started = time.monotonic()
        outcome = Outcome.LOST
        try:
            outcome = await self._attempt(attempt, kind)
        except asyncio.CancelledError:
            outcome = Outcome.RETURNED
            raise
        except StoreUnavailable as error:
            # The lease passes, and the job is tried again. If the transaction was committed after all, it is done.
            _LOG.warning("the end of a job could not be recorded", job=lease.id, kind=kind.name, error=error.message)
        finally:
            del self._attempts[lease.id]
            self._signals.jobs.notify()  # a place is free, and the next attempt may be due
            if self._observer is not None:
                seconds = time.monotonic() - started
                self._observer.job_ended(kind=kind.name, outcome=outcome.value, seconds=seconds)
        return outcome

    async def _attempt(self, attempt: _Attempt, kind: JobKind) -> Outcome:
        """Run the handler and record how it ended."""
        limit = asyncio.timeout(kind.timeout_seconds)
        try:
            async with limit:
                result = await kind.handler(attempt)
                if not attempt.is_complete:
                    await attempt.complete(_no_effect, result=result)
        except JobPostponed as pause:
            return await self._give_back(attempt, Outcome.POSTPONED, pause.seconds, str(pause))
        except LeaseLost:
            _LOG.info("job is no longer this worker's", job=attempt.id, kind=kind.name)
            return Outcome.LOST
        except asyncio.CancelledError:
            if attempt.is_lost:
                _LOG.info("job is no longer this worker's", job=attempt.id, kind=kind.name)
                return Outcome.LOST
            # The process stops. If it does not wait for this, the lease passes and the attempt counts.
            await self._give_back(attempt, Outcome.RETURNED, 0.0)
            raise
        except Exception as failure:  # noqa: BLE001  (recorded with the job)
            if attempt.is_complete:
                _LOG.exception("a handler failed after it completed its job", job=attempt.id, kind=kind.name)
                return Outcome.DONE
            late = JobFailure(f"it took longer than {kind.timeout_seconds:g} seconds")
            return await self._fail(attempt, kind, late if limit.expired() else failure)
        return Outcome.DONE

    async def _fail(self, attempt: _Attempt, kind: JobKind, error: Exception) -> Outcome:
        # The class of an unexpected exception says more than its message, which may be empty.
        message = str(error) if isinstance(error, JobFailure) and str(error) else f"{type(error).__name__}: {error}"
        refused = isinstance(error, JobRefused)
        state = await self._database.commit(
            lambda connection: record_failure(
                connection, kind, attempt.lease, message, now=self._clock(), refused=refused
            )
        )
        details = {"job": attempt.id, "kind": kind.name, "attempt": attempt.attempt, "error": message}
        if state == "dead":
            _LOG.error("job is dead", **details, exc_info=None if isinstance(error, JobFailure) else error)
            self._signals.events.notify()
        else:
            what = "job failed and is tried again" if state else "job failed after its lease was lost"
            _LOG.warning(what, **details)
        return Outcome(state) if state else Outcome.LOST

    async def _give_back(
        self, attempt: _Attempt, outcome: Outcome, seconds: float, reason: str | None = None
    ) -> Outcome:
        due_at = self._clock() + seconds
        returned = await self._database.commit(
            lambda connection: JobRepository(connection).give_back(attempt.lease, due_at=due_at, reason=reason)
        )
        return outcome if returned else Outcome.LOST


class _Attempt:
    """A leased job that runs: the `RunningJob` of its handler."""

    def __init__(self, database: Database, clock: Clock, lease: Lease) -> None:
        self._database = database
        self._clock = clock
        self.lease = lease
        self.task: asyncio.Task[Outcome] | None = None
        self.is_complete = False
        self.is_lost = False
        self.id, self.kind, self.key = lease.id, lease.kind, lease.key
        self.payload: Json = lease.payload
        self.run_id, self.attempt = lease.run_id, lease.attempt

    async def complete(self, work: Callable[[Connection], _Result], *, result: Json | None = None) -> _Result:
        """Run `work` and complete the job in one transaction (`kinds.RunningJob.complete`)."""

        def together(connection: Connection) -> _Result:
            # The job first: its row stays locked until the commit, and nothing of `work` happens without the lease.
            if not JobRepository(connection).complete(self.lease, result=result, now=self._clock()):
                raise LeaseLost(self.id)
            return work(connection)

        done = await self._database.commit(together)
        self.is_complete = True
        return done


def _no_effect(_connection: Connection) -> None:
    """Complete a job whose handler had no effect in the store, or had one that may be repeated."""
