"""A worker process of the benchmark: `python -m benchmarks.jobs.process DATABASE_URL LEASE_SECONDS [REDIS_URL]`.

Without a Redis it is a proxy's worker without the proxy; with one, it is `base-rl worker` with the benchmark's kind.
"""

from __future__ import annotations

import asyncio
import os
import sys

from benchmarks.jobs.ledger import ledger_kinds
from proxy import log
from proxy.clock import system_clock
from proxy.database.unit_of_work import Database
from proxy.jobs.running import JobRunner
from proxy.jobs.sweeping import JobSweeper
from proxy.jobs.worker import JobWorker
from proxy.lifecycle.signals import Signals
from proxy.settings import load_settings
from proxy.worker import run_worker

CONCURRENCY = 16
_SWEEP_SECONDS = 0.5


async def in_process(url: str, lease_seconds: float) -> None:
    """Run and sweep jobs until killed."""
    database, signals = Database(url), Signals()
    kinds = ledger_kinds(f"{os.getpid()}")
    runner = JobRunner(
        database,
        kinds,
        signals,
        system_clock,
        worker=f"bench@{os.getpid()}",
        concurrency=CONCURRENCY,
        lease_seconds=lease_seconds,
    )
    working = asyncio.create_task(JobWorker(runner, database, signals, system_clock).run())
    sweeper = JobSweeper(database, kinds, signals, system_clock)
    while not working.done():
        await sweeper.sweep()
        await asyncio.sleep(_SWEEP_SECONDS)
    await working


def main(url: str, lease_seconds: float, redis: str | None) -> None:
    log.configure("error")
    if redis is None:
        asyncio.run(in_process(url, lease_seconds))
        return
    settings = load_settings(
        None,
        {
            "database": {"url": url},
            "jobs": {"broker": redis, "lease_seconds": lease_seconds, "concurrency": CONCURRENCY},
            "server": {"log_level": "error"},
        },
    )
    run_worker(settings, make_kinds=lambda *_: ledger_kinds(f"{os.getpid()}"), late_seconds=3.0)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else None)
