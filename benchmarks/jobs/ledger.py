"""The work of the benchmark: a kind of job that fails by chance and writes a row that nothing keeps unique."""

from __future__ import annotations

import asyncio
import random
from functools import partial

from sqlalchemy import Connection, text

from proxy.database.unit_of_work import Database
from proxy.jobs.kinds import JobFailure, JobKind, JobKinds, RunningJob
from proxy.lifecycle.outbox import enqueue

KIND = "bench.judge"
FAILURE_RATE = 0.2
# The longest work: long enough that kills meet running jobs.
_WORK_SECONDS = 0.2
_MOST_AT_ONCE = 500

_CREATE = text("CREATE TABLE bench_ledger (job_id TEXT NOT NULL, worker TEXT NOT NULL)")
_INSERT = text("INSERT INTO bench_ledger (job_id, worker) VALUES (:job, :worker)")
_COUNTS = text(
    "SELECT count(*), count(DISTINCT job_id), (SELECT count(*) FROM jobs WHERE kind = :kind),"
    " (SELECT count(*) FROM jobs WHERE kind = :kind AND state = 'done'),"
    " (SELECT count(*) FROM jobs WHERE kind = :kind AND state = 'dead') FROM bench_ledger"
)


def ledger_kinds(worker: str, *, concurrency: int = 64) -> JobKinds:
    """Return the kind. A fifth of the attempts fail, half of those after their work."""

    async def judge(job: RunningJob) -> None:
        await asyncio.sleep(_WORK_SECONDS * random.random())
        if random.random() < FAILURE_RATE / 2:
            raise JobFailure("the judge failed before its work")

        def write(connection: Connection) -> None:
            connection.execute(_INSERT, {"job": job.id, "worker": worker})
            if random.random() < FAILURE_RATE / 2:
                raise JobFailure("the judge failed after its work, before the commit")

        await job.complete(write)

    # Twenty attempts, because kills cost attempts as well.
    return JobKinds(
        [
            JobKind(
                name=KIND,
                handler=judge,
                concurrency=concurrency,
                attempts=20,
                backoff_seconds=0.05,
                longest_backoff_seconds=1.0,
            )
        ]
    )


async def add_jobs(database: Database, count: int, *, runs: int = 4) -> None:
    """Make the ledger and enqueue the jobs, twice each: a repetition makes no second job."""

    def work(first: int, connection: Connection) -> None:
        for number in range(first, min(first + _MOST_AT_ONCE, count)):
            for _ in range(2):
                enqueue(
                    connection,
                    kind=KIND,
                    key=str(number),
                    payload={"number": number},
                    now=0.0,
                    run_id=f"run_{number % runs}",
                )

    await database.commit(lambda connection: connection.execute(_CREATE).close())
    for first in range(0, count, _MOST_AT_ONCE):
        await database.commit(partial(work, first))


async def counts(database: Database) -> dict[str, int]:
    """Return rows of the ledger, different jobs among them, jobs in all, done and dead ones."""
    row = await database.read(lambda connection: connection.execute(_COUNTS, {"kind": KIND}).one())
    return dict(zip(("entries", "jobs_in_ledger", "jobs", "done", "dead"), map(int, row), strict=True))
