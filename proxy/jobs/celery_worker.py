"""Celery's worker: threads that receive ids, and one event loop in which the jobs run."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from proxy.database.unit_of_work import Database
from proxy.errors import StoreUnavailable
from proxy.jobs.broker import TASK, celery_app
from proxy.jobs.repository import JobRepository
from proxy.jobs.running import JobRunner, Outcome
from proxy.jobs.worker import CELERY_WORKER
from proxy.lifecycle.signals import Signals
from proxy.settings import JobSettings

# Longest wait for a place, if jobs that this process found itself take all of them.
_PLACE_SECONDS = 1.0
_STOP_SECONDS = 10.0


class AttemptFailed(Exception):
    """A job's attempt failed. Celery and Flower show the task as failed; the reason is recorded with the job."""


def worker_name() -> str:
    """Return the name of this process, as leases and Flower show it."""
    return f"{CELERY_WORKER}{socket.gethostname()}-{os.getpid()}"[:100]


class SentJobs:
    """Runs jobs whose ids came through the broker."""

    def __init__(self, runner: JobRunner, database: Database, signals: Signals) -> None:
        self._runner = runner
        self._database = database
        self._signals = signals

    async def run(self, job_id: str) -> Outcome | None:
        """Lease and run the job; return None if it is not to be run: done, leased, not due, or its kind is at its
        bound. A job of the last sort is sent again."""
        while self._runner.free == 0:
            await self._signals.jobs.wait(_PLACE_SECONDS)
        try:
            kind = await self._database.read(lambda connection: JobRepository(connection).kind_of(job_id))
            if kind is None or self._runner.kinds.find(kind) is None:
                return None
            leases = await self._runner.lease({kind: [job_id]})
            if not leases:
                await self._database.commit(lambda connection: JobRepository(connection).unmark_sent([job_id]))
                return None
        except StoreUnavailable:
            return None  # the sweep finds the job when the store is back
        return await self._runner.start(leases[0])


def serve(
    settings: JobSettings,
    start: Callable[[], Awaitable[tuple[SentJobs, Callable[[], Awaitable[None]]]]],
    *,
    name: str,
    concurrency: int,
    log_level: str,
) -> None:
    """Run Celery's worker until SIGTERM or SIGINT, which lets running jobs end; a second signal gives them back.

    `start` makes the runner in the event loop and returns it with the function that closes it. Raise what it raises.
    """
    from celery import signals as celery_signals  # type: ignore[import-untyped]

    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="jobs", daemon=True)
    thread.start()
    jobs, close = asyncio.run_coroutine_threadsafe(_awaited(start()), loop).result()
    app = celery_app(str(settings.full_broker), settings.queue)

    @app.task(name=TASK, ignore_result=True, throws=(AttemptFailed,))  # type: ignore[untyped-decorator]
    def run_job(job_id: str) -> str:
        outcome = asyncio.run_coroutine_threadsafe(jobs.run(job_id), loop).result()
        if outcome in (Outcome.FAILED, Outcome.DEAD):
            raise AttemptFailed(f"{job_id} {outcome.value}")
        return "not run" if outcome is None else outcome.value

    def keep_logging(**_: Any) -> None:
        """Keep the logging that is set up already: a listener's presence stops Celery from replacing it."""

    celery_signals.setup_logging.connect(keep_logging, weak=False)
    try:
        # Threads, because jobs wait for HTTP and the store most of the time and run in one event loop. No gossip
        # among workers: the store decides who runs what.
        app.worker_main(
            [
                "worker",
                "--pool=threads",
                f"--concurrency={concurrency}",
                f"--queues={settings.queue}",
                f"--hostname={name}",
                f"--loglevel={log_level}",
                "--without-gossip",
                "--without-mingle",
                "--task-events",
            ]
        )
    finally:
        with suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(_awaited(close()), loop).result(_STOP_SECONDS)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(_STOP_SECONDS)


async def _awaited(work: Awaitable[Any]) -> Any:
    return await work
