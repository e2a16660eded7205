"""A worker whose machine has a wrong clock, beside proxies that are right."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from benchmarks.jobs.redis_server import RedisServer
from proxy.database.store_clock import StoreClock
from proxy.database.tables import JobRow
from proxy.database.unit_of_work import Database
from proxy.jobs.kinds import JobKind, JobKinds, RunningJob
from proxy.jobs.sweeping import JobSweeper
from proxy.lifecycle.outbox import enqueue
from proxy.lifecycle.signals import Signals
from tests.database import needs_postgresql, postgresql_database
from tests.proxy.jobs.redis_server import needs_redis

pytest.importorskip("celery")

KIND = "it"
AN_HOUR_BEHIND = """
import time
right = time.time
time.time = lambda: right() - 3600
from tests.proxy.jobs.test_clocks import work
work()
"""


def kinds_of(goes_on: Path) -> JobKinds:
    async def handle(_job: RunningJob) -> None:
        while not goes_on.exists():
            await asyncio.sleep(0.02)

    return JobKinds([JobKind(name=KIND, handler=handle, concurrency=1, attempts=1)])


def work() -> None:
    """Run jobs as `base-rl worker` does: `DATABASE_URL REDIS_URL FILE`."""
    from proxy.settings import load_settings
    from proxy.worker import run_worker

    url, redis, goes_on = sys.argv[1:]
    settings = load_settings(None, {"database": {"url": url}, "jobs": {"broker": redis}})
    run_worker(settings, make_kinds=lambda *_: kinds_of(Path(goes_on)), late_seconds=0.0)


@contextmanager
def worker_behind(*arguments: str, directory: Path) -> Iterator[subprocess.Popen[bytes]]:
    with (directory / "worker.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", AN_HOUR_BEHIND, *arguments],
            env={**os.environ, "BASE_RL_SERVER__DATA_DIR": str(directory)},
            stdout=log,
            stderr=log,
        )
    try:
        yield process
    finally:
        process.terminate()
        process.wait(30)


@needs_postgresql
@needs_redis
async def test_proxies_do_not_end_the_leases_of_a_worker_that_is_an_hour_behind(tmp_path: Path) -> None:
    redis, goes_on = RedisServer(tmp_path), tmp_path / "goes_on"
    with ExitStack() as stack:
        url = stack.enter_context(postgresql_database())
        redis.start()
        stack.callback(redis.kill)
        database = Database(url)
        clock = await StoreClock.open(database)
        await database.commit(lambda connection: enqueue(connection, kind=KIND, key="one", payload={}, now=clock()))
        worker = stack.enter_context(worker_behind(url, redis.url, str(goes_on), directory=tmp_path))

        async def until(state: str) -> None:
            async with asyncio.timeout(60):
                while (found := (await _row(database)).state) != state:
                    assert found in ("waiting", "running"), found
                    assert worker.poll() is None, (tmp_path / "worker.log").read_text()
                    await asyncio.sleep(0.02)

        await until("running")
        await JobSweeper(database, kinds_of(goes_on), Signals(), clock).sweep()
        row = await _row(database)
        assert (row.state, row.lease_until > clock()) == ("running", True)
        goes_on.touch()
        await until("done")
        await database.aclose()


async def _row(database: Database) -> Any:
    statement = select(*JobRow.__table__.columns)
    return await database.read(lambda connection: connection.execute(statement).one())
