"""Workers as processes that are killed with SIGKILL, one after the other, until all jobs are done."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from benchmarks.jobs.ledger import add_jobs, counts, ledger_kinds
from proxy.clock import system_clock
from proxy.database.unit_of_work import Database
from proxy.jobs.broker import CeleryBroker
from proxy.jobs.dispatching import JobDispatcher
from proxy.jobs.sweeping import JobSweeper
from proxy.lifecycle.signals import Signals

_ROOT = Path(__file__).resolve().parents[2]
_POLL_SECONDS = 0.05
_SWEEP_SECONDS = 0.5


class Workers:
    """Processes that run jobs; each that is killed has a successor."""

    def __init__(self, count: int, *arguments: str, log: Path) -> None:
        self._arguments = arguments
        self._log = log.open("ab")
        self._processes = [self._new() for _ in range(count)]
        self.killed = 0

    def kill_next(self) -> None:
        """Kill the oldest process and start another."""
        self._end(self._processes.pop(0))
        self._processes.append(self._new())
        self.killed += 1

    def close(self) -> None:
        for process in self._processes:
            self._end(process)
        self._log.close()

    def check(self) -> None:
        """Raise RuntimeError if a process ended by itself."""
        for process in self._processes:
            if process.poll() is not None:
                raise RuntimeError(f"a worker ended with status {process.returncode}: see {self._log.name}")

    def _new(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "benchmarks.jobs.process", *self._arguments]
        environment = {**os.environ, "PYTHONPATH": str(_ROOT)}
        return subprocess.Popen(command, cwd=_ROOT, env=environment, stdout=self._log, stderr=self._log)

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        process.send_signal(signal.SIGKILL)
        process.wait()


async def kill_workers(
    url: str,
    directory: Path,
    *,
    jobs: int,
    workers: int,
    kill_seconds: float,
    lease_seconds: float,
    limit_seconds: float,
    kill_jobs: int,
    redis: str | None = None,
) -> dict[str, Any]:
    """Have `jobs` done by workers, and return what is in the ledger.

    A worker is killed when `kill_seconds` have passed and `kill_jobs` more jobs were done since the last kill: on a
    busy machine, a process takes longer to start than the time between kills. With `redis`, the ids come through
    Celery, sent by this process in the place of a proxy. Raise TimeoutError after `limit_seconds`.
    """
    database = Database(url)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(database.aclose)
        await add_jobs(database, jobs)
        arguments = [url, str(lease_seconds), *([] if redis is None else [redis])]
        started = time.monotonic()
        if redis is not None:
            await stack.enter_async_context(_dispatching(database, redis))
        killing = Workers(workers, *arguments, log=directory / "workers.log")
        stack.callback(killing.close)
        kill_at, done_at_kill = time.monotonic() + kill_seconds, 0
        async with asyncio.timeout(limit_seconds):
            while True:
                await asyncio.sleep(_POLL_SECONDS)
                killing.check()
                found = await counts(database)
                if found["done"] + found["dead"] == jobs:
                    break
                if time.monotonic() >= kill_at and found["done"] >= done_at_kill + kill_jobs:
                    killing.kill_next()
                    kill_at, done_at_kill = time.monotonic() + kill_seconds, found["done"]
        return {**found, "killed": killing.killed, "seconds": round(time.monotonic() - started, 1)}


@asynccontextmanager
async def _dispatching(database: Database, redis: str) -> AsyncIterator[None]:
    """Do what a proxy does for workers: send ids, and end attempts whose lease passed."""
    kinds, signals = ledger_kinds("proxy"), Signals()
    broker = CeleryBroker(redis, "base-rl")
    dispatcher = JobDispatcher(broker, database, kinds, signals, system_clock, resend_seconds=3.0)
    sweeper = JobSweeper(database, kinds, signals, system_clock)

    async def sweep() -> None:
        while True:
            await sweeper.sweep()
            await asyncio.sleep(_SWEEP_SECONDS)

    tasks = [asyncio.create_task(dispatcher.run()), asyncio.create_task(sweep())]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        await dispatcher.aclose()
