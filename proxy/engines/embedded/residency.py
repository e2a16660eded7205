"""The adapters that an engine knows by name, and which of them are in memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import msgspec

from proxy.engines.common.wire import AdapterLoad, RequestRefused
from proxy.engines.embedded.lora import Adapter

Read = Callable[[str, str], Awaitable[Adapter]]
"""Read an adapter, by name and path. Raises RequestRefused."""


class AdapterLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The most LoRA adapters in memory, 0 for none at all, and the highest rank of one."""

    loaded: int
    rank: int


class _Known:
    """One name. `adapter` is None while the weights are put aside; `users` counts the requests that use them."""

    def __init__(self, path: str, adapter: Adapter, *, pinned: bool) -> None:
        self.path = path
        self.pinned = pinned
        self.adapter: Adapter | None = adapter
        self.leaving = False
        self.users = 0
        self.unused = asyncio.Event()
        self.unused.set()


class AdapterRegistry:
    """Adapters by name, at most `limit` of them in memory.

    Beyond that, the least recently used one that is not pinned is put aside, and read again from its path when a
    request names it. A request keeps the adapter that it began with. Everything runs in the event loop.
    """

    def __init__(self, read: Read, forget: Callable[[Adapter], Awaitable[None]], *, limit: int) -> None:
        self._read = read
        self._forget = forget
        self._limit = limit
        # Least recently used first.
        self._known: dict[str, _Known] = {}
        # One change of what is in memory at a time, in the order of the requests: two at once could exceed the limit,
        # and a request for an adapter that was put aside gets its turn although others are busy all the time.
        self._changing = asyncio.Lock()

    @property
    def is_empty(self) -> bool:
        """Whether no name is known."""
        return not self._known

    def paths(self) -> dict[str, str]:
        """Return the adapters in memory: paths by name."""
        return {name: each.path for name, each in self._known.items() if each.adapter is not None}

    async def load(self, body: AdapterLoad) -> None:
        """Read an adapter and remember its name. Raises RequestRefused with nothing changed."""
        if self._limit == 0:
            raise RequestRefused("this engine takes no LoRA adapters: start it with --max-loaded-loras 1 or more")
        name = body.lora_name
        async with self._changing:
            known = self._known.get(name)
            if known is not None:
                self._check_same(name, known, body)
                if known.adapter is None:
                    await self._bring_back(name, known)
                return
            pinned = sum(each.pinned for each in self._known.values())
            if body.pinned and pinned >= self._limit - 1:
                raise RequestRefused(
                    f"LoRA adapter {name} cannot be pinned: {pinned} of {self._limit} places are, and one is left "
                    "for the others"
                )
            adapter = await self._read(name, body.lora_path)
            await self._make_room()
            self._known[name] = _Known(body.lora_path, adapter, pinned=body.pinned)

    async def unload(self, name: str) -> None:
        """Forget a name at once, and its weights when its requests have ended. Raises RequestRefused for an unknown
        name."""
        known = self._known.get(name)
        if known is None:
            raise _not_loaded(name)
        known.leaving = True
        await known.unused.wait()
        if self._known.get(name) is known:
            del self._known[name]
            await self._release(known)

    @asynccontextmanager
    async def using(self, name: str | None) -> AsyncIterator[Adapter | None]:
        """Give the adapter to one request, after reading it again if it was put aside; None gives None.

        Raises RequestRefused for an unknown name.
        """
        if name is None:
            yield None
            return
        known = self._find(name)
        adapter = known.adapter
        if adapter is None:
            async with self._changing:
                known = self._find(name)
                adapter = known.adapter or await self._bring_back(name, known)
        # Without an await since `adapter` was read: nothing can put it aside before it counts as used.
        known.users += 1
        known.unused.clear()
        self._known[name] = self._known.pop(name)
        try:
            yield adapter
        finally:
            known.users -= 1
            if not known.users:
                known.unused.set()

    def _find(self, name: str) -> _Known:
        known = self._known.get(name)
        if known is None or known.leaving:
            raise _not_loaded(name)
        return known

    def _check_same(self, name: str, known: _Known, body: AdapterLoad) -> None:
        if known.leaving:
            raise RequestRefused(f"LoRA adapter {name} is being unloaded: its requests have not ended yet")
        if (known.path, known.pinned) != (body.lora_path, body.pinned):
            raise RequestRefused(
                f"LoRA adapter {name} is already loaded from {known.path}{' and pinned' if known.pinned else ''}: "
                "give other weights another name"
            )

    async def _bring_back(self, name: str, known: _Known) -> Adapter:
        try:
            adapter = await self._read(name, known.path)
        except RequestRefused as error:
            raise RequestRefused(f"LoRA adapter {name} cannot be read again: {error}") from error
        await self._make_room()
        if known.leaving:
            raise _not_loaded(name)
        known.adapter = adapter
        return adapter

    async def _make_room(self) -> None:
        """Put adapters aside until another one fits. Raises RequestRefused if all are pinned."""
        while len(loaded := [each for each in self._known.values() if each.adapter is not None]) >= self._limit:
            free = [each for each in loaded if not each.pinned or each.leaving]
            if not free:
                raise RequestRefused(f"all {len(loaded)} LoRA adapters in memory are pinned: unload one")
            chosen = next((each for each in free if not each.users), free[0])
            # Requests that name it from here on wait for it to be read again, so that it gets free at all.
            aside, chosen.adapter = chosen.adapter, None
            await chosen.unused.wait()
            if aside is not None:
                await self._forget(aside)

    async def _release(self, known: _Known) -> None:
        adapter, known.adapter = known.adapter, None
        if adapter is not None:
            await self._forget(adapter)


def _not_loaded(name: str) -> RequestRefused:
    return RequestRefused(f"LoRA adapter {name} is not loaded: load it by /load_lora_adapter first")
