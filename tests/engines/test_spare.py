"""Spare generations: they begin while an engine has room, and calls never wait for them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from proxy.engines.activity import EngineActivity
from proxy.engines.fair_queue import FairShare
from proxy.engines.slots import EngineSlots

CALL = FairShare("run")


async def until_idle() -> None:
    """Let every task run until it waits."""
    for _ in range(10):
        await asyncio.sleep(0)


class Work:
    """Calls and spare generations at one engine, each of which runs until it is told to end."""

    def __init__(self, count: int) -> None:
        self.activity = EngineActivity()
        self.slots = EngineSlots(count, self.activity)
        self.running: list[str] = []
        self.ended: dict[str, str] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self._ends: dict[str, asyncio.Event] = {}

    async def call(self, name: str) -> None:
        await self._start(name, self._call(name))

    async def spare(self, name: str, busy_share: float = 0.0) -> None:
        await self._start(name, self._spare(name, busy_share))

    async def end(self, name: str) -> None:
        self._ends[name].set()
        await until_idle()

    async def _start(self, name: str, work: object) -> None:
        self._ends[name] = asyncio.Event()
        self.tasks[name] = asyncio.create_task(work)  # type: ignore[arg-type]
        await until_idle()

    async def _call(self, name: str) -> None:
        async with self.slots.slot(CALL):
            await self._hold(name)

    async def _spare(self, name: str, busy_share: float) -> None:
        slot = self.slots.spare(busy_share)
        try:
            async with slot:
                await self._hold(name)
            self.ended[name] = "whole"
        except TimeoutError:
            assert slot.revoked
            self.ended[name] = "revoked"

    async def _hold(self, name: str) -> None:
        self.running.append(name)
        try:
            await self._ends[name].wait()
        finally:
            self.running.remove(name)


@asynccontextmanager
async def work_at(count: int) -> AsyncIterator[Work]:
    work = Work(count)
    yield work
    for task in work.tasks.values():
        task.cancel()
    await asyncio.gather(*work.tasks.values(), return_exceptions=True)
    assert not work.running
    assert work.activity.generations == 0


async def test_a_call_ends_the_spare_generations_of_an_idle_engine_and_does_not_wait() -> None:
    async with work_at(2) as work:
        await work.spare("a")
        await work.spare("b")
        await work.spare("c")
        assert work.running == ["a", "b"], "as many as there are slots"
        await work.call("call")
        assert work.running == ["call"]
        assert work.ended == {"a": "revoked", "b": "revoked"}
        await work.end("call")
        assert work.running == ["c"]
        await work.end("c")
        assert work.ended["c"] == "whole"


async def test_spare_generations_run_beside_calls_up_to_their_bound() -> None:
    async with work_at(4) as work:
        await work.call("one")
        await work.spare("idle only")
        await work.spare("beside", busy_share=0.5)
        await work.spare("beside too", busy_share=0.5)
        assert work.running == ["one", "beside", "beside too"]
        await work.call("two")
        assert work.running == ["one", "beside", "beside too", "two"], "half of the slots are held"
        await work.call("three")
        assert work.running == ["one", "two", "three"]


async def test_the_newest_gives_way_first() -> None:
    async with work_at(4) as work:
        for name in ("a", "b", "c", "d"):
            await work.spare(name, busy_share=0.9)
        await work.call("one")
        assert work.running == ["a", "b", "c", "one"]


async def test_waiting_calls_come_before_spare_generations() -> None:
    async with work_at(1) as work:
        await work.call("one")
        await work.spare("spare", busy_share=0.9)
        await work.call("two")
        await work.end("one")
        assert work.running == ["two"]
        await work.end("two")
        assert work.running == ["spare"]


@pytest.mark.parametrize("has_begun", [False, True])
async def test_a_cancelled_one_leaves_its_room_to_others(has_begun: bool) -> None:
    async with work_at(1) as work:
        if not has_begun:
            await work.call("call")
        await work.spare("gone")
        await work.spare("next")
        work.tasks["gone"].cancel()
        await until_idle()
        if not has_begun:
            await work.end("call")
        assert work.running == ["next"]


async def test_one_that_ended_in_the_moment_of_a_call_is_whole() -> None:
    async with work_at(1) as work:
        await work.spare("spare")
        ending = asyncio.create_task(work.end("spare"))
        call = asyncio.create_task(work.call("call"))
        await asyncio.gather(ending, call)
        assert work.running == ["call"]
        assert work.ended == {"spare": "whole"}


async def test_fewer_slots_end_spare_generations() -> None:
    async with work_at(4) as work:
        for name in ("a", "b", "c"):
            await work.spare(name)
        work.slots.fit(1)
        await until_idle()
        assert work.running == ["a", "b"], "an engine that runs one at a time is given two"
