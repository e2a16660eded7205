"""The slots of an engine: who waits, who is next, and what a wait that is cancelled leaves behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from proxy.engines.activity import EngineActivity
from proxy.engines.fair_queue import FairShare
from proxy.engines.slots import EngineSlots

ONE, OTHER = FairShare("one"), FairShare("other")


async def until_idle() -> None:
    """Let every task run until it waits."""
    for _ in range(10):
        await asyncio.sleep(0)


class Calls:
    """Calls that hold a slot until they are told to end."""

    def __init__(self, slots: EngineSlots) -> None:
        self.slots = slots
        self.began: list[str] = []
        self._ends: dict[str, asyncio.Event] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def begin(self, name: str, share: FairShare = ONE) -> None:
        self._ends[name] = asyncio.Event()
        self._tasks[name] = asyncio.create_task(self._run(name, share))
        await until_idle()

    async def end(self, name: str) -> None:
        self._ends[name].set()
        await until_idle()

    def cancel(self, name: str) -> None:
        self._tasks[name].cancel()

    async def end_all(self) -> None:
        for event in self._ends.values():
            event.set()
        await asyncio.wait(self._tasks.values(), timeout=5)
        assert all(task.done() for task in self._tasks.values())

    async def _run(self, name: str, share: FairShare) -> None:
        async with self.slots.slot(share):
            self.began.append(name)
            await self._ends[name].wait()


@asynccontextmanager
async def calls_at(count: int) -> AsyncIterator[Calls]:
    activity = EngineActivity()
    calls = Calls(EngineSlots(count, activity))
    yield calls
    await calls.end_all()
    assert activity.generations == 0
    assert not calls.slots.waiting
    async with asyncio.timeout(1), calls.slots.slot(ONE):  # every slot came back
        assert activity.generations == 1


async def test_calls_that_wait_are_not_counted_at_the_engine() -> None:
    activity = EngineActivity()
    slots = EngineSlots(1, activity)
    async with slots.slot(ONE):
        waiting = asyncio.create_task(slots.slot(ONE).__aenter__())
        await until_idle()
        assert (activity.generations, slots.waiting) == (1, True)
        waiting.cancel()
        await asyncio.wait([waiting])
    assert (activity.generations, slots.waiting) == (0, False)


async def test_a_generation_that_fails_has_left_the_engine() -> None:
    activity = EngineActivity()
    slots = EngineSlots(1, activity)

    async def fail() -> None:
        async with slots.slot(ONE):
            raise ZeroDivisionError

    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            await fail()
    assert activity.generations == 0


async def test_the_next_slot_is_not_for_the_run_that_came_first_but_for_the_one_with_the_smallest_share() -> None:
    async with calls_at(1) as calls:
        for number in range(4):
            await calls.begin(f"a{number}", ONE)
        await calls.begin("b", OTHER)
        for name in ("a0", "a1"):
            await calls.end(name)
        assert calls.began[:3] in (["a0", "b"], ["a0", "a1", "b"])


async def test_a_call_that_is_cancelled_in_the_moment_of_its_turn_passes_the_slot_on() -> None:
    async with calls_at(1) as calls:
        for name in ("first", "cancelled", "last"):
            await calls.begin(name)
        # Both before the waiting call runs: the slot is granted to it, and then it is cancelled.
        await_grant = asyncio.get_running_loop().create_task(calls.end("first"))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        calls.cancel("cancelled")
        await await_grant
        await until_idle()
        assert calls.began[-1] == "last"


async def test_a_cancelled_call_that_waits_is_passed_over() -> None:
    async with calls_at(1) as calls:
        for name in ("first", "cancelled", "last"):
            await calls.begin(name)
        calls.cancel("cancelled")
        await calls.end("first")
        assert calls.began == ["first", "last"]


@pytest.mark.parametrize(("running", "count"), [(None, 100), (8, 9), (1, 2), (64, 72), (500, 100)])
def test_there_are_a_few_more_slots_than_the_engine_runs(running: int | None, count: int) -> None:
    slots = EngineSlots(100, EngineActivity())
    slots.fit(8)
    slots.fit(running)
    assert slots.count == count


async def test_a_larger_engine_takes_waiting_calls_at_once_and_a_smaller_one_none_until_there_is_room() -> None:
    async with calls_at(64) as calls:
        calls.slots.fit(1)
        for number in range(4):
            await calls.begin(str(number))
        assert calls.began == ["0", "1"]
        calls.slots.fit(2)
        await until_idle()
        assert calls.began == ["0", "1", "2"]
        calls.slots.fit(1)
        await calls.end("0")
        assert calls.began == ["0", "1", "2"]
        await calls.end("1")
        assert calls.began == ["0", "1", "2", "3"]
