"""The life of a job on both databases: enqueued with its cause, leased, ended exactly once."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from sqlalchemy import Connection

from proxy.jobs.kinds import JobFailure, JobPostponed, JobRefused, LeaseLost, RunningJob
from proxy.jobs.running import Outcome
from proxy.lifecycle.outbox import MAX_PAYLOAD_BYTES, enqueue
from tests.proxy.jobs.world import LEASE_SECONDS, Jobs, effect, until


async def test_a_job_is_enqueued_with_its_cause_or_not_at_all(jobs: Jobs) -> None:
    class Refused(Exception):
        pass

    def work(connection: Connection) -> None:
        assert enqueue(connection, kind="it", key="a", payload={"n": 1}, now=jobs.clock()) is not None
        raise Refused

    with pytest.raises(Refused):
        await jobs.database.commit(work)
    assert await jobs.service.page() == []


async def test_a_key_names_one_job_of_its_kind(jobs: Jobs) -> None:
    (first,) = await jobs.add("it", "a", "a")
    assert await jobs.add("it", "a") == []
    assert len(await jobs.add("other", "a")) == 1
    assert [job.id for job in await jobs.service.page(kind="it")] == [first]


async def test_jobs_enqueued_at_the_same_time_with_one_key_are_one(jobs: Jobs) -> None:
    made = await asyncio.gather(*(jobs.add("it", "a") for _ in range(20)))
    assert sum(map(len, made)) == 1


@pytest.mark.parametrize("wrong", [{"key": ""}, {"key": "x" * 501}, {"not_before": float("nan")}])
async def test_wrong_jobs_are_refused(jobs: Jobs, wrong: dict[str, Any]) -> None:
    given: dict[str, Any] = {"kind": "it", "key": "a", "payload": {}, "now": 0.0, **wrong}
    with pytest.raises(ValueError, match=r"key|not_before"):
        await jobs.database.commit(lambda connection: enqueue(connection, **given))


async def test_a_large_payload_is_refused(jobs: Jobs) -> None:
    with pytest.raises(ValueError, match="store ids in it"):
        await jobs.database.commit(
            lambda connection: enqueue(
                connection, kind="it", key="a", payload={"text": "x" * MAX_PAYLOAD_BYTES}, now=0.0
            )
        )


async def test_a_job_is_done_with_its_effect_and_its_result(jobs: Jobs) -> None:
    async def handle(job: RunningJob) -> None:
        assert (job.kind, job.key, job.attempt, job.run_id) == ("it", "a", 1, "run_1")
        assert await job.complete(lambda _: 7, result={"score": 0.5}) == 7

    jobs.kind("it", handle)
    (job_id,) = await jobs.add("it", "a", run_id="run_1")
    assert await jobs.run_due(jobs.runner()) == [Outcome.DONE]
    done = await jobs.service.show(job_id)
    assert (done.state, done.result, done.error, done.worker) == ("done", {"score": 0.5}, None, None)
    assert done.finished_at == jobs.clock()
    assert await jobs.run_due(jobs.runner()) == []


async def test_a_handler_that_does_not_complete_is_completed_with_its_result(jobs: Jobs) -> None:
    async def handle(_job: RunningJob) -> dict[str, Any]:
        return {"sent": True}

    jobs.kind("it", handle)
    (job_id,) = await jobs.add("it", "a")
    assert await jobs.run_due(jobs.runner()) == [Outcome.DONE]
    assert (await jobs.service.show(job_id)).result == {"sent": True}


async def test_an_effect_that_fails_leaves_neither_effect_nor_completion(jobs: Jobs) -> None:
    async def handle(job: RunningJob) -> None:
        def work(connection: Connection) -> None:
            effect(job.id)(connection)
            raise RuntimeError("after the effect")

        await job.complete(work)

    jobs.kind("it", handle)
    (job_id,) = await jobs.add("it", "a")
    assert await jobs.run_due(jobs.runner()) == [Outcome.FAILED]
    assert await jobs.effects() == []
    assert (await jobs.service.show(job_id)).error == "RuntimeError: after the effect"


async def test_a_failed_job_is_tried_again_after_growing_pauses_and_then_dead(jobs: Jobs) -> None:
    async def handle(_job: RunningJob) -> None:
        raise JobFailure("the judge answered nonsense")

    jobs.kind("it", handle, attempts=3, backoff_seconds=10.0)
    (job_id,) = await jobs.add("it", "a")
    runner = jobs.runner()
    for attempt, longest in ((1, 10.0), (2, 20.0)):
        assert await jobs.run_due(runner) == [Outcome.FAILED]
        failed = await jobs.service.show(job_id)
        assert (failed.state, failed.attempts, failed.error) == ("failed", attempt, "the judge answered nonsense")
        assert longest / 2 <= failed.due_at - jobs.clock() <= longest
        assert await jobs.run_due(runner) == []
        jobs.clock.now = failed.due_at
    assert await jobs.run_due(runner) == [Outcome.DEAD]
    assert (await jobs.service.show(job_id)).state == "dead"
    (reported,) = await jobs.events("job.dead")
    assert (reported["job"], reported["attempts"], reported["error"]) == (job_id, 3, "the judge answered nonsense")
    assert jobs.seen.outcomes == ["failed", "failed", "dead"]


async def test_a_refused_job_is_dead_at_once_and_a_postponed_one_loses_no_attempt(jobs: Jobs) -> None:
    async def refuse(_job: RunningJob) -> None:
        raise JobRefused("the session was erased")

    async def postpone(job: RunningJob) -> None:
        assert job.attempt == 1
        raise JobPostponed("the budget is spent", seconds=3600)

    jobs.kind("refused", refuse)
    jobs.kind("postponed", postpone, attempts=1)
    (refused,) = await jobs.add("refused", "a")
    (postponed,) = await jobs.add("postponed", "a")
    runner = jobs.runner()
    for _ in range(3):
        await jobs.run_due(runner)
        waiting = await jobs.service.show(postponed)
        assert (waiting.state, waiting.attempts, waiting.error) == ("waiting", 0, "the budget is spent")
        assert waiting.due_at == jobs.clock() + 3600
        jobs.clock.now += 3600
    dead = await jobs.service.show(refused)
    assert (dead.state, dead.attempts, dead.error) == ("dead", 1, "the session was erased")


async def test_a_job_that_takes_too_long_fails(jobs: Jobs) -> None:
    async def hang(_job: RunningJob) -> None:
        await asyncio.Event().wait()

    jobs.kind("it", hang, timeout_seconds=0.05)
    (job_id,) = await jobs.add("it", "a")
    assert await jobs.run_due(jobs.runner()) == [Outcome.FAILED]
    assert (await jobs.service.show(job_id)).error == "it took longer than 0.05 seconds"


async def test_a_worker_that_lost_its_lease_has_no_effect(jobs: Jobs) -> None:
    gate, lost = asyncio.Event(), asyncio.Event()

    async def handle(job: RunningJob) -> None:
        if job.attempt == 1:
            await gate.wait()
        try:
            await job.complete(effect(job.id))
        except LeaseLost:
            lost.set()
            raise

    jobs.kind("it", handle, backoff_seconds=0.0)
    (job_id,) = await jobs.add("it", "a")
    slow = asyncio.create_task(jobs.run_due(jobs.runner("slow")))
    await until(lambda: _is_running(jobs, job_id))
    jobs.clock.now += LEASE_SECONDS + 1
    await jobs.sweeper.sweep()
    failed = await jobs.service.show(job_id)
    assert failed.error == "the worker slow stopped without ending the attempt"
    assert await jobs.run_due(jobs.runner("quick")) == [Outcome.DONE]
    gate.set()
    assert await slow == [Outcome.LOST]
    assert lost.is_set()
    assert await jobs.effects() == [job_id]


async def test_a_lease_that_was_extended_meanwhile_is_not_ended(jobs: Jobs) -> None:
    gate = asyncio.Event()

    async def handle(_job: RunningJob) -> None:
        await gate.wait()

    jobs.kind("it", handle)
    (job_id,) = await jobs.add("it", "a")
    runner = jobs.runner(lease_seconds=0.06)
    beating = asyncio.create_task(runner.heartbeats())
    running = asyncio.create_task(jobs.run_due(runner))
    await until(lambda: _is_running(jobs, job_id))
    jobs.clock.now += 1000

    async def extended() -> bool:
        return bool((await jobs.row(job_id)).lease_until > jobs.clock())

    await until(extended)
    await jobs.sweeper.sweep()
    gate.set()
    assert await running == [Outcome.DONE]
    beating.cancel()


async def test_a_worker_that_dies_again_and_again_makes_a_job_dead(jobs: Jobs) -> None:
    jobs.kind("it", attempts=2, backoff_seconds=0.0)
    (job_id,) = await jobs.add("it", "a")
    for state in ("failed", "dead"):
        await jobs.runner("doomed").lease({"it": [job_id]})
        jobs.clock.now += LEASE_SECONDS + 1
        await jobs.sweeper.sweep()
        assert (await jobs.service.show(job_id)).state == state


async def test_a_worker_that_stops_gives_its_jobs_back(jobs: Jobs) -> None:
    async def hang(_job: RunningJob) -> None:
        await asyncio.Event().wait()

    jobs.kind("it", hang)
    (job_id,) = await jobs.add("it", "a")
    runner = jobs.runner()
    for lease in await runner.lease({"it": [job_id]}):
        runner.start(lease)
    assert (await jobs.service.show(job_id)).worker == "one"
    await asyncio.sleep(0)
    await runner.aclose()
    returned = await jobs.service.show(job_id)
    assert (returned.state, returned.attempts, returned.due_at) == ("waiting", 0, jobs.clock())
    assert jobs.seen.outcomes == ["returned"]


async def test_a_cancelled_job_is_interrupted_and_its_effect_refused(jobs: Jobs) -> None:
    interrupted = asyncio.Event()

    async def hang(_job: RunningJob) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            interrupted.set()

    jobs.kind("it", hang)
    (job_id,) = await jobs.add("it", "a")
    runner = jobs.runner(lease_seconds=0.06)
    beating = asyncio.create_task(runner.heartbeats())
    running = asyncio.create_task(jobs.run_due(runner))
    await until(lambda: _is_running(jobs, job_id))
    assert (await jobs.service.cancel(job_id)).state == "cancelled"
    assert await running == [Outcome.LOST]
    assert interrupted.is_set()
    assert (await jobs.service.show(job_id)).state == "cancelled"
    beating.cancel()


async def test_no_more_jobs_of_a_kind_run_than_it_allows_whoever_runs_them(jobs: Jobs) -> None:
    jobs.kind("it", concurrency=3)
    jobs.kind("other", concurrency=2)
    ids = await jobs.add("it", *"abcdefgh")
    others = await jobs.add("other", "a")
    found = {"it": ids, "other": others}
    leased = await asyncio.gather(*(jobs.runner(name).lease(found) for name in ("one", "two", "three")))
    kinds = [lease.kind for leases in leased for lease in leases]
    assert (kinds.count("it"), kinds.count("other")) == (3, 1)
    assert await jobs.run_due(jobs.runner()) == []


async def test_runs_share_the_workers(jobs: Jobs) -> None:
    jobs.kind("it", concurrency=4)
    for run in ("crowded", "small", ""):
        await jobs.add("it", *(f"{run}{number}" for number in range(20 if run == "crowded" else 2)), run_id=run)
    order: list[str] = []
    runner = jobs.runner()
    for _ in range(3):
        leases = await runner.lease(await _found(jobs, runner))
        order += [lease.run_id or "none" for lease in leases]
        await asyncio.gather(*(runner.start(lease) for lease in leases))
    assert sorted(order[:8]) == ["crowded"] * 4 + ["none"] * 2 + ["small"] * 2
    assert order[8:] == ["crowded"] * 4


async def test_jobs_wait_for_their_time_and_for_their_kind(jobs: Jobs) -> None:
    jobs.kind("it")
    await jobs.add("it", "later", not_before=jobs.clock() + 60)
    await jobs.add("unknown", "a")
    assert await jobs.run_due(jobs.runner()) == []
    jobs.clock.now += 60
    assert await jobs.run_due(jobs.runner()) == [Outcome.DONE]
    (figures,) = [kind for kind in await jobs.service.kinds() if kind.kind == "unknown"]
    assert (figures.waiting, figures.concurrency, figures.oldest_seconds) == (1, None, 60)


async def _is_running(jobs: Jobs, job_id: str) -> bool:
    return (await jobs.service.show(job_id)).state == "running"


async def _found(jobs: Jobs, runner: Any) -> Any:
    from proxy.jobs.leasing import find_due

    return await jobs.database.read(
        lambda connection: find_due(connection, jobs.kinds, before=jobs.clock(), want=100, last_runs=runner.last_runs)
    )
