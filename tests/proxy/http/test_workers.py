"""Threads for large requests: bounded in number, with the caller's context."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Iterator

import pytest

from proxy.http import workers as module
from proxy.http.workers import Workers, trim_memory

_NAME: contextvars.ContextVar[str] = contextvars.ContextVar("name")


@pytest.fixture
def workers() -> Iterator[Workers]:
    opened = Workers(2)
    yield opened
    opened.close()


async def test_work_runs_on_another_thread_and_sees_the_callers_context(workers: Workers) -> None:
    _NAME.set("call")
    thread, name = await workers.run(lambda: (threading.get_ident(), _NAME.get()))
    assert (thread == threading.get_ident(), name) == (False, "call")


async def test_the_works_exception_is_raised(workers: Workers) -> None:
    def fail() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await workers.run(fail)


async def test_work_above_the_number_of_threads_waits(workers: Workers) -> None:
    gate, lock = threading.Event(), threading.Lock()
    running = most = 0

    def work() -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        assert gate.wait(20)
        with lock:
            running -= 1

    tasks = [asyncio.create_task(workers.run(work)) for _ in range(6)]
    async with asyncio.timeout(20):
        while most < 2:
            await asyncio.sleep(0.001)
    gate.set()
    await asyncio.gather(*tasks)
    assert most == 2


async def test_requests_that_follow_each_other_share_one_trim(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    trimmed: list[int] = []
    monkeypatch.setattr(module, "_TRIM_SECONDS", 0.01)
    monkeypatch.setattr(module, "trim_memory", lambda: trimmed.append(1))
    for _ in range(5):
        workers.trim_soon()
    async with asyncio.timeout(20):
        while not trimmed:
            await asyncio.sleep(0.001)
    await workers.run(lambda: None)
    assert trimmed == [1]


def test_memory_is_trimmed_without_error_on_any_platform() -> None:
    trim_memory()
