"""The watch distinguishes a hung engine from a busy one, and callers of a hung engine fail at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NamedTuple

import pytest

from proxy.engines.protocol import PauseMode
from proxy.engines.sglang import SglangEngine
from proxy.engines.watch import EngineWatch
from proxy.errors import EngineTimeout, EngineUnavailable
from proxy.settings import EngineSettings
from tests.engines.generating import ask, collect
from tests.fakes.lying_engine import Event, LyingEngine, lying_engine
from tests.paces import at_some_pace

PATIENCE = 0.3


class Watched(NamedTuple):
    server: LyingEngine
    engine: SglangEngine
    watch: EngineWatch
    changes: list[None]

    async def hangs(self) -> None:
        """Ping until the watch has changed its verdict."""
        before = len(self.changes)
        async with asyncio.timeout(30):
            while len(self.changes) == before:
                await self.watch.ping_once()


@pytest.fixture
async def watched() -> AsyncIterator[Watched]:
    changes: list[None] = []
    async with lying_engine([1, 2, 3, 4]) as server:
        engine = SglangEngine(server.url, EngineSettings(url=server.url, max_concurrency=2))
        watch = EngineWatch(
            engine, interval_seconds=0.01, patience_seconds=PATIENCE, changed=lambda: changes.append(None)
        )
        yield Watched(server, engine, watch, changes)
        server.answers.set()
        await engine.aclose()


async def test_calls_on_a_hung_engine_fail_and_those_that_wait_do_too(watched: Watched) -> None:
    await watched.watch.ping_once()
    watched.server.answers.clear()
    calls = [asyncio.create_task(collect(watched.engine, ask(stream=index % 2 == 0))) for index in range(5)]
    control = asyncio.create_task(watched.engine.info())
    await watched.hangs()
    errors = await asyncio.gather(*calls, control, return_exceptions=True)
    assert [type(error) for error in errors] == [EngineTimeout] * 2 + [EngineUnavailable] * 3 + [EngineTimeout]
    assert "has not answered for" in str(errors[0])
    with pytest.raises(EngineUnavailable, match="hangs or is stopped"):
        await collect(watched.engine, ask())


async def test_an_engine_that_answers_again_is_served_again(watched: Watched) -> None:
    await watched.watch.ping_once()
    watched.server.answers.clear()
    await watched.hangs()
    watched.server.answers.set()
    await watched.hangs()
    assert (await collect(watched.engine, ask())).ids == (1, 2, 3, 4)
    assert len(watched.changes) == 2


async def test_a_busy_engine_is_not_hung(watched: Watched) -> None:
    """During a long prompt no part of the answer arrives, but the server answers pings."""
    watched.server.lie = lambda truth: [PATIENCE * 3, *truth.whole()]
    call = asyncio.create_task(collect(watched.engine, ask(stream=True)))
    while not call.done():
        await watched.watch.ping_once()
        await asyncio.sleep(0.01)
    assert (await call).ids == (1, 2, 3, 4)
    assert watched.changes == []


async def test_an_engine_that_never_answered_may_still_be_starting(watched: Watched) -> None:
    watched.server.answers.clear()
    for _ in range(6):
        await watched.watch.ping_once()
    assert watched.changes == []


async def test_one_answer_restarts_the_time_out(watched: Watched) -> None:
    await watched.watch.ping_once()
    for _ in range(3):
        watched.server.answers.clear()
        await watched.watch.ping_once()
        watched.server.answers.set()
        await watched.watch.ping_once()
    assert watched.changes == []


@asynccontextmanager
async def impatient(server: LyingEngine, stall_seconds: float) -> AsyncIterator[SglangEngine]:
    """A client that gives an answer up after so many seconds without a token."""
    settings = EngineSettings(url=server.url, stall_timeout_seconds=stall_seconds)
    engine = SglangEngine(server.url, settings)
    try:
        yield engine
    finally:
        await engine.aclose()


async def test_an_answer_that_stops_in_the_middle_ends(watched: Watched) -> None:
    watched.server.lie = lambda truth: [truth.chunk(0, 2), 20.0]
    async with impatient(watched.server, 0.1) as stalling:
        with pytest.raises(EngineTimeout, match=r"0\.1 s"):
            await collect(stalling, ask(stream=True))


async def test_an_answer_without_new_tokens_ends(watched: Watched) -> None:
    async def check(stall: float) -> None:
        silent: list[Event] = [stall / 5] * 100
        watched.server.lie = lambda truth: [
            truth.chunk(0, 2),
            *(part for wait in silent for part in (wait, truth.chunk(2, 2))),
        ]
        async with impatient(watched.server, stall) as stalling:
            with pytest.raises(EngineTimeout) as raised:
                await collect(stalling, ask(stream=True))
        assert "no token came" in str(raised.value)

    await at_some_pace(check, 0.1, 2.0)


async def test_the_first_token_may_take_its_time(watched: Watched) -> None:
    async def check(stall: float) -> None:
        watched.server.lie = lambda truth: [3 * stall, *truth.whole()]
        async with impatient(watched.server, stall) as stalling:
            assert (await collect(stalling, ask(stream=True))).ids == (1, 2, 3, 4)

    await at_some_pace(check, 0.1, 2.0)


async def test_a_weight_update_does_not_count_as_a_stall(watched: Watched) -> None:
    async def check(stall: float) -> None:
        watched.server.lie = lambda truth: [truth.chunk(0, 2), 3 * stall, *truth.whole()[1:]]
        async with impatient(watched.server, stall) as stalling:
            await stalling.pause(PauseMode.IN_PLACE)
            assert (await collect(stalling, ask(stream=True))).ids == (1, 2, 3, 4)

    await at_some_pace(check, 0.1, 2.0)
