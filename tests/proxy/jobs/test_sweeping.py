"""Schedules over several proxies, and the removal of old jobs."""

from __future__ import annotations

import asyncio

from proxy.jobs.kinds import Schedule
from proxy.jobs.sweeping import JobSweeper, cleaning
from proxy.settings import JobSettings
from tests.proxy.jobs.world import Jobs

HOUR = 3600.0


async def test_every_tick_has_one_job_however_many_proxies_sweep(jobs: Jobs) -> None:
    jobs.kind("nightly")
    jobs.kinds.add_schedule(Schedule(name="s", kind="nightly", every_seconds=HOUR, offset_seconds=60))
    proxies = [JobSweeper(jobs.database, jobs.kinds, jobs.signals, jobs.clock) for _ in range(3)]
    ran = []
    for _ in range(4):
        await asyncio.gather(*(proxy.sweep() for proxy in proxies))
        await asyncio.gather(*(proxy.sweep() for proxy in proxies))
        ran.append(len(await jobs.run_due(jobs.runner())))
        jobs.clock.now += HOUR / 2
    assert sum(ran) in (2, 3)
    assert max(ran) == 1
    ticks = {job.key for job in await jobs.service.page()}
    assert len(ticks) == sum(ran)
    assert all((float(key.removeprefix("s@")) - 60) % HOUR == 0 for key in ticks)
    (schedule,) = await jobs.service.schedules()
    assert schedule.last_at is not None
    assert schedule.last_at + HOUR == schedule.next_at > jobs.clock() - HOUR / 2


async def test_a_proxy_whose_clock_is_behind_repeats_no_tick(jobs: Jobs) -> None:
    jobs.kind("nightly")
    jobs.kinds.add_schedule(Schedule(name="s", kind="nightly", every_seconds=HOUR))
    await jobs.sweeper.sweep()
    await jobs.run_due(jobs.runner())
    behind = JobSweeper(jobs.database, jobs.kinds, jobs.signals, lambda: jobs.clock() - 2 * HOUR)
    await behind.sweep()
    assert await jobs.run_due(jobs.runner()) == []
    assert len(await jobs.service.page()) == 1


async def test_ticks_do_not_pile_up_behind_an_unfinished_job(jobs: Jobs) -> None:
    jobs.kind("nightly")
    jobs.kinds.add_schedule(Schedule(name="s", kind="nightly", every_seconds=HOUR))
    for _ in range(5):
        await jobs.sweeper.sweep()
        jobs.clock.now += HOUR
    assert len(await jobs.service.page()) == 1
    await jobs.run_due(jobs.runner())
    await jobs.sweeper.sweep()
    assert [job.state for job in await jobs.service.page()] == ["waiting", "done"]


async def test_old_jobs_are_removed_and_their_keys_are_free_again(jobs: Jobs) -> None:
    kind, schedule = cleaning(jobs.database, JobSettings(keep_days=1, keep_dead_days=2), jobs.clock)
    jobs.kinds.register(kind)
    jobs.kinds.add_schedule(schedule)
    jobs.kind("good")
    bad = jobs.kind("bad", lambda _: _fail(), attempts=1)
    await jobs.add("good", *(f"{number}" for number in range(600)))
    await jobs.add("bad", "a")
    for _ in range(200):
        if not await jobs.run_due(jobs.runner(concurrency=1000)):
            break
    assert {(job.kind, job.state.value) for job in await jobs.service.page(limit=1000)} == {
        ("good", "done"),
        (bad.name, "dead"),
    }
    left = []
    for days in (0.5, 1, 1):
        jobs.clock.now += days * 24 * HOUR
        await jobs.sweeper.sweep()
        await jobs.run_due(jobs.runner())
        listed = await jobs.service.page(limit=1000)
        left.append((sum(job.kind == "good" for job in listed), sum(job.kind == "bad" for job in listed)))
    assert left == [(600, 1), (0, 1), (0, 0)]
    assert len(await jobs.add("good", "1")) == 1


async def _fail() -> None:
    raise RuntimeError
