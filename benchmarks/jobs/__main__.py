"""`make bench-jobs`: 10,000 jobs on SQLite in-process, and on PostgreSQL with Celery and Redis. Workers are killed
every ten seconds and a fifth of the attempts fail. Fails unless every job is done exactly once.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.jobs.killing import kill_workers
from benchmarks.jobs.redis_server import RedisServer
from benchmarks.postgresql import DURABLE, PostgresServer
from proxy.database.migrate import upgrade

_RESULTS = Path(__file__).resolve().parents[1] / "results" / "jobs.json"
_LEASE_SECONDS = 5.0
_LIMIT_SECONDS = 1800.0
# Ten seconds are enough for hundreds of jobs, unless the machine is so busy that a process needs them to start.
_KILL_JOBS = 50


def main() -> int:
    """Run both parts, write the results, and return 1 if a job was not done exactly once."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true", help="500 jobs and kills every 3 seconds; writes no results")
    short = parser.parse_args().short
    jobs, kill_seconds = (500, 3.0) if short else (10_000, 10.0)
    results: dict[str, Any] = {"machine": machine.describe(), "jobs": jobs, "kill_seconds": kill_seconds}
    with tempfile.TemporaryDirectory(prefix="bench-jobs-") as name:
        directory = Path(name)
        url = f"sqlite:///{directory / 'store.sqlite3'}"
        upgrade(url)
        results["sqlite"] = _run(url, directory, jobs=jobs, kill_seconds=kill_seconds, workers=1, redis=None)
        server, redis = PostgresServer(DURABLE), RedisServer(directory)
        server.start()
        redis.start()
        try:
            server.make_database("jobs")
            upgrade(server.url("jobs"))
            results["postgresql"] = _run(
                server.url("jobs"), directory, jobs=jobs, kill_seconds=kill_seconds, workers=2, redis=redis.url
            )
        finally:
            redis.kill()
            server.remove()
    print(json.dumps(results, indent=2))
    if not short:
        _RESULTS.write_text(json.dumps(results, indent=2) + "\n")
    parts = (results["sqlite"], results["postgresql"])
    return 0 if all(part["entries"] == part["jobs_in_ledger"] == part["done"] == jobs for part in parts) else 1


def _run(
    url: str, directory: Path, *, jobs: int, kill_seconds: float, workers: int, redis: str | None
) -> dict[str, Any]:
    return asyncio.run(
        kill_workers(
            url,
            directory,
            jobs=jobs,
            workers=workers,
            kill_seconds=kill_seconds,
            kill_jobs=_KILL_JOBS,
            lease_seconds=_LEASE_SECONDS,
            limit_seconds=_LIMIT_SECONDS,
            redis=redis,
        )
    )


if __name__ == "__main__":
    sys.exit(main())
