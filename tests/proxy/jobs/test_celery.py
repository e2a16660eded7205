"""Ids of jobs through Celery and a real Redis, which is killed meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from benchmarks.jobs.redis_server import RedisServer
from proxy.jobs.broker import BrokerAway, CeleryBroker
from proxy.jobs.celery_worker import SentJobs
from proxy.jobs.dispatching import AHEAD, JobDispatcher
from proxy.jobs.running import Outcome
from tests.proxy.jobs.redis_server import needs_redis
from tests.proxy.jobs.world import Jobs

pytest.importorskip("celery")
pytestmark = needs_redis

RESEND_SECONDS = 30.0


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path)
    server.start()
    yield server
    server.kill()


@asynccontextmanager
async def dispatching(jobs: Jobs, redis: RedisServer) -> AsyncIterator[tuple[JobDispatcher, CeleryBroker]]:
    broker = CeleryBroker(redis.url, "test")
    dispatcher = JobDispatcher(
        broker, jobs.database, jobs.kinds, jobs.signals, jobs.clock, resend_seconds=RESEND_SECONDS
    )
    try:
        yield dispatcher, broker
    finally:
        await dispatcher.aclose()


async def test_every_id_is_sent_once_and_again_if_it_was_lost(jobs: Jobs, redis: RedisServer) -> None:
    jobs.kind("it", concurrency=10)
    await jobs.add("it", *map(str, range(15)))
    async with dispatching(jobs, redis) as (dispatcher, broker), dispatching(jobs, redis) as (other, _):
        sent = await asyncio.gather(dispatcher.dispatch(), other.dispatch())
        assert sum(sent) == broker.queued() == 10  # as many as the kind may run
        assert await dispatcher.dispatch() == 0
        redis.kill()
        redis.start()  # without its memory
        assert broker_queued(broker) == 0
        assert await dispatcher.dispatch() == 0  # they may be on their way
        jobs.clock.now += RESEND_SECONDS + 1
        assert await dispatcher.dispatch() == 10


async def test_the_queue_is_short(jobs: Jobs, redis: RedisServer) -> None:
    jobs.kind("it", concurrency=1000)
    await jobs.add("it", *map(str, range(AHEAD + 20)))
    async with dispatching(jobs, redis) as (dispatcher, broker):
        assert await dispatcher.dispatch() == AHEAD
        jobs.clock.now += RESEND_SECONDS + 1
        assert await dispatcher.dispatch() == 0
        assert broker.queued() == AHEAD


async def test_without_redis_no_job_counts_as_sent(jobs: Jobs, redis: RedisServer) -> None:
    jobs.kind("it")
    (job_id,) = await jobs.add("it", "a")
    async with dispatching(jobs, redis) as (dispatcher, broker):
        assert broker.queued() == 0
        redis.kill()
        with pytest.raises(BrokerAway):
            await dispatcher.dispatch()
        assert (await jobs.row(job_id)).dispatched_at is None
        redis.start()
        assert await retried(dispatcher) == 1
        assert (await jobs.row(job_id)).dispatched_at == jobs.clock()


async def test_an_id_that_comes_twice_is_run_once(jobs: Jobs) -> None:
    jobs.kind("it", concurrency=1)
    first, second = await jobs.add("it", "a", "b")
    sent = SentJobs(jobs.runner("worker@here"), jobs.database, jobs.signals)
    outcomes = await asyncio.gather(*(sent.run(job_id) for job_id in (first, first, "job_none")))
    assert sorted(map(str, outcomes)) == ["None", "None", "done"]
    assert await sent.run(first) is None
    assert await sent.run(second) is Outcome.DONE
    assert await jobs.effects() == [first, second]


def broker_queued(broker: CeleryBroker) -> int:
    """Return the length of the queue; the first connection after a restart of Redis may be a dead one."""
    try:
        return broker.queued()
    except BrokerAway:
        return broker.queued()


async def retried(dispatcher: JobDispatcher) -> int:
    try:
        return await dispatcher.dispatch()
    except BrokerAway:
        return await dispatcher.dispatch()
