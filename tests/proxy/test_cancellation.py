from __future__ import annotations

import asyncio

import pytest

from proxy.cancellation import despite_cancellation


async def test_the_result_and_the_error_are_those_of_the_work() -> None:
    async def fails() -> None:
        raise ValueError("broken")

    assert await despite_cancellation(asyncio.sleep(0, result=3)) == 3
    with pytest.raises(ValueError, match="broken"):
        await despite_cancellation(fails())


async def test_a_caller_that_is_cancelled_twice_ends_after_the_work() -> None:
    began, may_end, ended = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def work() -> None:
        began.set()
        await may_end.wait()
        ended.set()

    caller = asyncio.create_task(despite_cancellation(work()))
    await began.wait()
    for _ in range(2):
        caller.cancel()
        for _ in range(10):  # more turns of the loop than a cancellation takes to arrive
            await asyncio.sleep(0)
        assert not caller.done()

    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert ended.is_set()
