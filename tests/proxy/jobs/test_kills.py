"""Workers are killed with SIGKILL while handlers fail, and every job is done once. In full: `make bench-jobs`."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.jobs.killing import kill_workers
from benchmarks.jobs.redis_server import RedisServer
from tests.database import needs_postgresql, postgresql_database, sqlite_database
from tests.proxy.jobs.redis_server import needs_redis

JOBS = 150
KILLS = 2


def check(found: dict[str, float]) -> None:
    expected = {"entries": JOBS, "jobs_in_ledger": JOBS, "jobs": JOBS, "done": JOBS, "dead": 0}
    assert {name: found[name] for name in expected} == expected
    assert found["killed"] >= KILLS


async def test_on_sqlite_in_process(tmp_path: Path) -> None:
    url = sqlite_database(tmp_path)
    check(
        await kill_workers(
            url, tmp_path, jobs=JOBS, workers=1, kill_seconds=0, kill_jobs=40, lease_seconds=1, limit_seconds=90
        )
    )


@needs_postgresql
@needs_redis
async def test_on_postgresql_with_celery_and_redis(tmp_path: Path) -> None:
    pytest.importorskip("celery")
    redis = RedisServer(tmp_path)
    redis.start()
    try:
        with postgresql_database() as url:
            check(
                await kill_workers(
                    url,
                    tmp_path,
                    jobs=JOBS,
                    workers=2,
                    kill_seconds=0,
                    kill_jobs=40,
                    lease_seconds=1,
                    limit_seconds=90,
                    redis=redis.url,
                )
            )
    finally:
        redis.kill()
