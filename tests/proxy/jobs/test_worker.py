"""The worker within a process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager, suppress

from proxy.jobs.kinds import RunningJob
from proxy.jobs.worker import CELERY_WORKER, JobWorker
from tests.proxy.jobs.world import Jobs, until


@asynccontextmanager
async def working(jobs: Jobs, *, concurrency: int = 4, late_seconds: float = 0.0) -> AsyncIterator[None]:
    runner = jobs.runner(concurrency=concurrency)
    stands_in = late_seconds > 0
    worker = JobWorker(
        runner, jobs.database, jobs.signals, jobs.clock, late_seconds=late_seconds, stands_in=stands_in
    )
    task: Awaitable[None] = asyncio.create_task(worker.run())
    try:
        yield
    finally:
        assert isinstance(task, asyncio.Task)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def test_jobs_run_as_they_come_and_no_more_at_once_than_allowed(jobs: Jobs) -> None:
    running, most = 0, 0

    async def handle(_job: RunningJob) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1

    jobs.kind("it", handle, concurrency=100)
    ids = await jobs.add("it", *map(str, range(30)))
    async with working(jobs, concurrency=4):

        async def done() -> bool:
            return not any(kind.waiting or kind.running for kind in await jobs.service.kinds())

        await until(done)
        ids += await jobs.add("it", "one more")
        jobs.signals.jobs.notify()
        await until(done)
    assert most == 4
    assert {job.id for job in await jobs.service.page(limit=100) if job.state == "done"} == set(ids)


async def test_a_worker_that_stops_leaves_its_job_to_the_next_one(jobs: Jobs) -> None:
    started, attempts = asyncio.Event(), 0

    async def handle(job: RunningJob) -> None:
        nonlocal attempts
        attempts += 1
        started.set()
        if attempts == 1:
            await asyncio.Event().wait()
        assert job.attempt == 1

    jobs.kind("it", handle)
    (job_id,) = await jobs.add("it", "a")
    async with working(jobs):
        await started.wait()
    async with working(jobs):

        async def done() -> bool:
            return (await jobs.service.show(job_id)).state == "done"

        await until(done)
    assert attempts == 2


async def test_a_proxy_stands_in_only_while_no_worker_process_is_at_work(jobs: Jobs) -> None:
    jobs.kind("it")
    gate = asyncio.Event()

    async def wait(_job: RunningJob) -> None:
        await gate.wait()

    jobs.kind("long", wait)
    (long,) = await jobs.add("long", "a")
    process = jobs.runner(f"{CELERY_WORKER}elsewhere")
    (lease,) = await process.lease({"long": [long]})
    running = process.start(lease)
    (job_id,) = await jobs.add("it", "a")
    worker = JobWorker(jobs.runner(), jobs.database, jobs.signals, jobs.clock, late_seconds=20, stands_in=True)
    assert await worker.take() == 0  # the message may still be under way
    jobs.clock.now += 21
    assert await worker.take() == 0  # late, but workers are there
    gate.set()
    await running
    assert await worker.take() == 1

    async def done() -> bool:
        return (await jobs.service.show(job_id)).state == "done"

    await until(done)
