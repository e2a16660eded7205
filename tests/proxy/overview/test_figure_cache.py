from __future__ import annotations

import asyncio

import pytest

from proxy.errors import StoreUnavailable
from proxy.overview.figure_cache import FigureCache


class Counted:
    """A figure that counts its computations. A computation waits for `let_go` and takes `seconds` of the clock
    `elapsed`."""

    def __init__(self) -> None:
        self.now = 0.0
        self.seconds = 0.0
        self.computed = 0
        self.let_go = asyncio.Event()
        self.let_go.set()
        self.fails = False

    def elapsed(self) -> float:
        return self.now

    async def compute(self) -> int:
        self.computed += 1
        await self.let_go.wait()
        self.now += self.seconds
        if self.fails:
            raise StoreUnavailable("away")
        return self.computed


@pytest.fixture
def counted() -> Counted:
    return Counted()


def always(_answer: int) -> bool:
    return True


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_without_a_hold_time_each_request_computes(counted: Counted) -> None:
    cache = FigureCache(0.0, counted.elapsed)
    assert await cache.get("figure", counted.compute) == 1
    answers = await asyncio.gather(*(cache.get("figure", counted.compute) for _ in range(5)))
    assert sorted(answers) == answers
    assert counted.computed >= 2


async def test_concurrent_requests_cause_one_computation(counted: Counted) -> None:
    cache = FigureCache(0.5, counted.elapsed)
    assert await asyncio.gather(*(cache.get("figure", counted.compute) for _ in range(5))) == [1] * 5
    counted.now += 0.5
    assert await asyncio.gather(*(cache.get("figure", counted.compute) for _ in range(5))) == [2] * 5


async def test_a_fresh_figure_is_never_from_the_cache(counted: Counted) -> None:
    cache = FigureCache(0.5, counted.elapsed)
    assert [await cache.get("figure", counted.compute, fresh=True) for _ in range(3)] == [1, 2, 3]
    assert await cache.get("figure", counted.compute) == 3


async def test_a_figure_is_cached_in_proportion_to_its_cost(counted: Counted) -> None:
    """The cost of the first computation does not count: it includes connecting and compiling."""
    cache, counted.seconds = FigureCache(0.0, counted.elapsed), 1.0
    assert await cache.get("figure", counted.compute) == 1
    assert await cache.get("figure", counted.compute) == 2
    counted.now += 19.5
    assert await cache.get("figure", counted.compute) == 2
    counted.now += 0.5
    assert await cache.get("figure", counted.compute) == 3


async def test_a_stale_figure_is_returned_and_refreshed_in_the_background(counted: Counted) -> None:
    cache = FigureCache(0.0, counted.elapsed)
    assert await cache.get("figure", counted.compute, may_be_stale=always) == 1
    counted.let_go.clear()
    for _ in range(3):
        assert await cache.get("figure", counted.compute, may_be_stale=always) == 1, "the stale figure, at once"
        await settled()
    assert counted.computed == 2, "one at a time"
    counted.let_go.set()
    await settled()
    assert await cache.get("figure", counted.compute, may_be_stale=always) == 2
    cache.close()


async def test_a_figure_older_than_a_minute_is_computed_first(counted: Counted) -> None:
    cache = FigureCache(0.0, counted.elapsed)
    assert await cache.get("figure", counted.compute, may_be_stale=always) == 1
    counted.now += 60.0
    assert await cache.get("figure", counted.compute, may_be_stale=always) == 1
    await settled()
    counted.now += 60.5
    assert await cache.get("figure", counted.compute, may_be_stale=always) == 3


async def test_a_late_request_waits_for_the_refresh_under_way(counted: Counted) -> None:
    cache = FigureCache(0.5, counted.elapsed)
    assert await cache.get("figure", counted.compute, may_be_stale=always) == 1
    counted.let_go.clear()
    counted.now += 1.0
    assert await cache.get("figure", counted.compute, may_be_stale=always) == 1
    await settled()
    counted.now += 60.0
    late = asyncio.create_task(cache.get("figure", counted.compute, may_be_stale=always))
    await settled()
    assert not late.done()
    counted.let_go.set()
    assert await late == 2


async def test_after_a_failed_refresh_the_next_request_gets_the_error(counted: Counted) -> None:
    cache = FigureCache(0.0, counted.elapsed)
    await cache.get("figure", counted.compute, may_be_stale=always)
    counted.fails = True
    assert await cache.get("figure", counted.compute, may_be_stale=always) == 1
    await settled()
    with pytest.raises(StoreUnavailable):
        await cache.get("figure", counted.compute, may_be_stale=always)
    cache.close()
