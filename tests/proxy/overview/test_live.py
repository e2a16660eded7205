from __future__ import annotations

import asyncio

import pytest

from proxy.errors import StoreUnavailable
from proxy.overview.live import Remembered


class Counted:
    """A figure that counts how often it was computed, and waits to be let go. `elapsed` is its clock; computing takes
    `seconds` of it."""

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


async def test_what_is_not_held_is_made_anew_for_who_asks(counted: Counted) -> None:
    remembered = Remembered(0.0, counted.elapsed)
    assert await remembered.get("figure", counted.compute) == 1
    answers = await asyncio.gather(*(remembered.get("figure", counted.compute) for _ in range(5)))
    assert sorted(answers) == answers
    assert counted.computed >= 2


async def test_many_who_ask_at_once_cause_one_computation(counted: Counted) -> None:
    remembered = Remembered(0.5, counted.elapsed)
    assert await asyncio.gather(*(remembered.get("figure", counted.compute) for _ in range(5))) == [1] * 5
    counted.now += 0.5
    assert await asyncio.gather(*(remembered.get("figure", counted.compute) for _ in range(5))) == [2] * 5


async def test_what_was_made_before_is_not_given_to_who_wants_it_anew(counted: Counted) -> None:
    remembered = Remembered(0.5, counted.elapsed)
    assert [await remembered.get("figure", counted.compute, anew=True) for _ in range(3)] == [1, 2, 3]
    assert await remembered.get("figure", counted.compute) == 3


async def test_it_is_kept_in_proportion_to_its_cost_but_for_the_first(counted: Counted) -> None:
    """The first one's is that of connecting and compiling as well."""
    remembered, counted.seconds = Remembered(0.0, counted.elapsed), 1.0
    assert await remembered.get("figure", counted.compute) == 1
    assert await remembered.get("figure", counted.compute) == 2
    counted.now += 19.5
    assert await remembered.get("figure", counted.compute) == 2
    counted.now += 0.5
    assert await remembered.get("figure", counted.compute) == 3


async def test_what_may_be_old_is_made_behind_who_asks(counted: Counted) -> None:
    remembered = Remembered(0.0, counted.elapsed)
    assert await remembered.get("figure", counted.compute, may_be_old=always) == 1
    counted.let_go.clear()
    for _ in range(3):
        assert await remembered.get("figure", counted.compute, may_be_old=always) == 1, "the old one, at once"
        await settled()
    assert counted.computed == 2, "one at a time"
    counted.let_go.set()
    await settled()
    assert await remembered.get("figure", counted.compute, may_be_old=always) == 2
    remembered.close()


async def test_after_a_minute_it_is_waited_for(counted: Counted) -> None:
    remembered = Remembered(0.0, counted.elapsed)
    assert await remembered.get("figure", counted.compute, may_be_old=always) == 1
    counted.now += 60.0
    assert await remembered.get("figure", counted.compute, may_be_old=always) == 1
    await settled()
    counted.now += 60.5
    assert await remembered.get("figure", counted.compute, may_be_old=always) == 3


async def test_who_comes_too_late_for_it_waits_for_the_one_that_is_being_made(counted: Counted) -> None:
    remembered = Remembered(0.5, counted.elapsed)
    assert await remembered.get("figure", counted.compute, may_be_old=always) == 1
    counted.let_go.clear()
    counted.now += 1.0
    assert await remembered.get("figure", counted.compute, may_be_old=always) == 1
    await settled()
    counted.now += 60.0
    late = asyncio.create_task(remembered.get("figure", counted.compute, may_be_old=always))
    await settled()
    assert not late.done()
    counted.let_go.set()
    assert await late == 2


async def test_where_that_fails_the_next_who_asks_is_told(counted: Counted) -> None:
    remembered = Remembered(0.0, counted.elapsed)
    await remembered.get("figure", counted.compute, may_be_old=always)
    counted.fails = True
    assert await remembered.get("figure", counted.compute, may_be_old=always) == 1
    await settled()
    with pytest.raises(StoreUnavailable):
        await remembered.get("figure", counted.compute, may_be_old=always)
    remembered.close()
