"""The parts of a proxy that have to do with jobs, built together."""

from __future__ import annotations

import os
import socket
from contextlib import AsyncExitStack
from dataclasses import dataclass

from proxy.clock import Clock
from proxy.contract.extras import missing_packages
from proxy.database.unit_of_work import Database
from proxy.jobs.dispatching import JobDispatcher
from proxy.jobs.kinds import JobKinds
from proxy.jobs.running import JobObserver, JobRunner
from proxy.jobs.service import JobService
from proxy.jobs.sweeping import JobSweeper
from proxy.jobs.worker import JobWorker
from proxy.lifecycle.signals import Signals
from proxy.settings import ConfigurationError, JobSettings

# How long a due job waits until a proxy runs it in place of worker processes, if none of them is at work.
STAND_IN_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True)
class Jobs:
    """`dispatcher` is None without a broker: the proxy's own worker then runs all jobs."""

    service: JobService
    sweeper: JobSweeper
    worker: JobWorker
    dispatcher: JobDispatcher | None


def build_jobs(
    settings: JobSettings,
    *,
    database: Database,
    kinds: JobKinds,
    signals: Signals,
    clock: Clock,
    observer: JobObserver,
    stack: AsyncExitStack,
) -> Jobs:
    """Build the parts; nothing runs yet. Raise ConfigurationError if the broker's packages are missing."""
    runner = JobRunner(
        database,
        kinds,
        signals,
        clock,
        worker=f"proxy@{socket.gethostname()}-{os.getpid()}"[:100],
        concurrency=settings.concurrency,
        lease_seconds=settings.lease_seconds,
        observer=observer,
    )
    dispatcher = None
    if (broker_url := settings.full_broker) is not None:
        if reason := missing_packages("celery"):
            raise ConfigurationError(reason)
        from proxy.jobs.broker import CeleryBroker

        broker = CeleryBroker(broker_url, settings.queue)
        dispatcher = JobDispatcher(broker, database, kinds, signals, clock)
        stack.push_async_callback(dispatcher.aclose)
    return Jobs(
        service=JobService(database, kinds, signals, clock),
        sweeper=JobSweeper(database, kinds, signals, clock),
        worker=JobWorker(
            runner,
            database,
            signals,
            clock,
            late_seconds=0.0 if dispatcher is None else STAND_IN_SECONDS,
            stands_in=dispatcher is not None,
        ),
        dispatcher=dispatcher,
    )
