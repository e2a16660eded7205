"""Which adapters are in memory, with adapters that are only names and paths."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.engines.common.wire import AdapterLoad, RequestRefused
from proxy.engines.embedded.lora import Adapter
from proxy.engines.embedded.residency import AdapterRegistry


class Files:
    """Counts how often each path was read, and which adapters were released."""

    def __init__(self) -> None:
        self.read: list[str] = []
        self.released: list[str] = []
        self.missing: set[str] = set()

    async def open(self, name: str, path: str) -> Adapter:
        await asyncio.sleep(0)
        if path in self.missing:
            raise RequestRefused(f"there is no {path}")
        self.read.append(path)
        return Adapter(name, 1, {})

    async def release(self, adapter: Adapter) -> None:
        self.released.append(adapter.name)


def registry(limit: int) -> tuple[AdapterRegistry, Files]:
    files = Files()
    return AdapterRegistry(files.open, files.release, limit=limit), files


def named(name: str, *, pinned: bool = False) -> AdapterLoad:
    return AdapterLoad(lora_name=name, lora_path=f"/{name}", pinned=pinned)


async def ticks() -> None:
    """Let every task run until it waits for something that another one does."""
    for _ in range(20):
        await asyncio.sleep(0)


async def test_an_idle_adapter_makes_room_before_a_busy_one() -> None:
    adapters, files = registry(2)
    await adapters.load(named("a"))
    await adapters.load(named("b"))
    async with adapters.using("a"), adapters.using("b"):
        pass
    async with adapters.using("a") as held:  # used last, but busy
        await adapters.load(named("c"))
        assert set(adapters.paths()) == {"a", "c"}
        assert held is not None
        assert held.name == "a"
    assert files.released == ["b"]


async def test_with_all_of_them_busy_the_next_one_waits_and_gets_its_turn() -> None:
    adapters, files = registry(1)
    await adapters.load(named("a"))
    async with AsyncExitStack() as running:
        await running.enter_async_context(adapters.using("a"))
        loading = asyncio.create_task(adapters.load(named("b")))
        await ticks()
        assert not loading.done()

        async def use(name: str) -> str:
            async with adapters.using(name) as adapter:
                assert adapter is not None
                return adapter.name

        later = asyncio.create_task(use("a"))  # a steady stream of requests for `a` would starve `b`
        await ticks()
        assert not later.done()
    await loading
    assert await later == "a"
    assert await use("b") == "b"
    assert files.read == ["/a", "/b", "/a", "/b"]


async def test_an_unknown_or_unloaded_name_is_refused_and_unloading_waits() -> None:
    adapters, files = registry(2)
    with pytest.raises(RequestRefused, match="not loaded"):
        await adapters.unload("a")
    await adapters.load(named("a"))
    async with adapters.using("a"):
        first = asyncio.create_task(adapters.unload("a"))
        second = asyncio.create_task(adapters.unload("a"))
        await ticks()
        assert not first.done()
        with pytest.raises(RequestRefused, match="not loaded"):
            async with adapters.using("a"):
                pass
        with pytest.raises(RequestRefused, match="being unloaded"):
            await adapters.load(named("a"))
        assert not adapters.is_empty
    await asyncio.gather(first, second)
    assert not adapters.paths()
    assert files.released == ["a"]
    await adapters.load(AdapterLoad(lora_name="a", lora_path="/elsewhere"))
    assert adapters.paths() == {"a": "/elsewhere"}


async def test_a_file_that_is_gone_refuses_the_request_and_moves_no_other_adapter() -> None:
    adapters, files = registry(1)
    await adapters.load(named("a"))
    await adapters.load(named("b"))
    files.missing.add("/a")
    with pytest.raises(RequestRefused, match="LoRA adapter a cannot be read again: there is no /a"):
        async with adapters.using("a"):
            pass
    assert set(adapters.paths()) == {"b"}
    with pytest.raises(RequestRefused, match="already loaded from /b"):
        await adapters.load(AdapterLoad(lora_name="b", lora_path="/c"))
    with pytest.raises(RequestRefused, match="cannot be pinned"):
        await adapters.load(named("c", pinned=True))


async def test_an_engine_with_room_for_none_takes_none() -> None:
    adapters, _ = registry(0)
    with pytest.raises(RequestRefused, match="--max-loaded-loras"):
        await adapters.load(named("a"))


@given(st.data(), st.integers(1, 3))
def test_never_more_in_memory_than_allowed_and_every_request_gets_its_own(data: st.DataObject, limit: int) -> None:
    names = "abcde"
    calls = st.tuples(st.sampled_from(["load", "use", "unload"]), st.sampled_from(names))
    steps = data.draw(st.lists(calls, max_size=30))

    async def check() -> None:
        adapters, _ = registry(limit)
        tasks = []
        running: set[str] = set()

        async def use(name: str) -> None:
            async with adapters.using(name) as adapter:
                assert adapter is not None
                assert adapter.name == name
                running.add(name)
                assert len(set(adapters.paths()) | running) <= limit
                await ticks()
                assert len(adapters.paths()) <= limit
                running.discard(name)

        for kind, name in steps:
            call = {"load": lambda n: adapters.load(named(n)), "use": use, "unload": adapters.unload}[kind]
            tasks.append(asyncio.create_task(call(name)))
            if data.draw(st.booleans()):
                await ticks()
        async with asyncio.timeout(10):
            results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(result is None or isinstance(result, RequestRefused) for result in results)

    asyncio.run(check())
