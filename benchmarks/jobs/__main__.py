"""`make bench-jobs`: kills of workers, and calls beside judgements.

`kills`: 10,000 jobs on SQLite in-process, and on PostgreSQL with Celery and Redis. Workers are killed every ten
seconds and a fifth of the attempts fail. Fails unless every job is done exactly once.

`calls`: agents' calls while a thousand judgements run (`benchmarks.jobs.calls`). Fails beyond its targets.

Each part replaces its own figures in `benchmarks/results/jobs.json`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import uvloop

from benchmarks import machine
from benchmarks.jobs import calls
from benchmarks.jobs.killing import kill_workers
from benchmarks.jobs.redis_server import RedisServer
from benchmarks.postgresql import DURABLE, PostgresServer
from benchmarks.targets import target_rows
from proxy.database.migrate import upgrade

_RESULTS = Path(__file__).resolve().parents[1] / "results" / "jobs.json"
_PARTS = ("calls", "kills")
_LEASE_SECONDS = 5.0
_LIMIT_SECONDS = 1800.0
# Ten seconds are enough for hundreds of jobs, unless the machine is so busy that a process needs them to start.
_KILL_JOBS = 50


def main() -> int:
    """Run the parts, write their results, and return 1 if one of them failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=_PARTS, default=list(_PARTS))
    parser.add_argument("--jobs", type=int, help="instead of 10,000; writes no results")
    parser.add_argument("--short", action="store_true", help="a minute for each part; writes no results")
    options = parser.parse_args()
    results: dict[str, Any] = json.loads(_RESULTS.read_text()) if _RESULTS.exists() else {}
    succeeded = True
    # Calls first: the machine is quiet before a thousand processes were killed.
    for part in [part for part in _PARTS if part in options.parts]:
        with tempfile.TemporaryDirectory(prefix="bench-jobs-") as name:
            if part == "calls":
                found, is_right = _calls(Path(name), short=options.short)
            else:
                found, is_right = _kills(Path(name), short=options.short, jobs=options.jobs)
        print(json.dumps({part: found}, indent=2), flush=True)
        results[part] = {"machine": machine.describe(), **found}
        succeeded &= is_right
    if not (options.short or options.jobs):
        _RESULTS.write_text(json.dumps(results, indent=2) + "\n")
    return 0 if succeeded else 1


def _calls(directory: Path, *, short: bool) -> tuple[dict[str, Any], bool]:
    """Return the figures, and whether they reach the targets; short ones are not judged."""
    found = uvloop.run(calls.measure(directory, calls.SHORT if short else calls.FULL))
    targets = calls.targets(found)
    for what, bound, measured in target_rows(targets):
        print(f"{what}: {measured} ({bound})")
    return found, short or all(target.reached for target in targets)


def _kills(directory: Path, *, short: bool, jobs: int | None) -> tuple[dict[str, Any], bool]:
    """Return the figures of both databases, and whether every job was done exactly once."""
    count, kill_seconds = (500, 3.0) if short else (10_000, 10.0)
    count = jobs or count
    url = f"sqlite:///{directory / 'store.sqlite3'}"
    upgrade(url)
    found = {"sqlite": _run(url, directory, jobs=count, kill_seconds=kill_seconds, workers=1, redis=None)}
    server, redis = PostgresServer(DURABLE), RedisServer(directory)
    server.start()
    redis.start()
    try:
        server.make_database("jobs")
        upgrade(server.url("jobs"))
        found["postgresql"] = _run(
            server.url("jobs"), directory, jobs=count, kill_seconds=kill_seconds, workers=2, redis=redis.url
        )
    finally:
        redis.kill()
        server.remove()
    is_right = all(
        part["entries"] == part["jobs_in_ledger"] == part["done"] == count and part["killed"]
        for part in found.values()
    )
    return {"jobs": count, "kill_seconds": kill_seconds, **found}, is_right


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
