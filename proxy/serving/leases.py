"""One proxy at a time changes what an engine holds.

A lease is two columns of the engine's row. Its owner renews it while it loads; the lease of a proxy that dies ends by
itself, or at once if the proxy ran on this machine. No proxy has a role that could be lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from typing import Protocol

from proxy.contract.identifiers import EngineId, RunId
from proxy.errors import StoreUnavailable
from proxy.serving.registry import LEASE_SECONDS, EngineRegistry


class Lease(Protocol):
    """The right to change what one engine holds."""

    @property
    def is_taken(self) -> bool:
        """Whether another proxy has the lease, as of the last health interval."""
        ...

    @property
    def is_abandoned(self) -> bool:
        """Whether a proxy died with the lease: it may have left the engine paused."""
        ...

    def is_awaited(self, run_id: RunId) -> bool:
        """Return whether another proxy still uses the engine for other runs than this one."""
        ...

    def held(self) -> AbstractAsyncContextManager[bool]:
        """Have the lease for the block; False if another proxy has it. Raises StoreUnavailable."""
        ...


class SoleLease:
    """The lease of an engine that no other proxy uses."""

    is_taken = False
    is_abandoned = False

    def is_awaited(self, run_id: RunId) -> bool:
        return False

    @asynccontextmanager
    async def held(self) -> AsyncIterator[bool]:
        yield True


class EngineLease:
    """The lease of an engine that the proxies of a store share."""

    def __init__(self, registry: EngineRegistry, engine_id: EngineId) -> None:
        self._registry = registry
        self._engine_id = engine_id
        self._holders = 0
        """Controllers of this proxy within `held`: those of several adapter runs load at the same time."""
        # Else one controller could give the lease back after another one has taken it.
        self._changing = asyncio.Lock()

    @property
    def is_taken(self) -> bool:
        return self._registry.lease_state(self._engine_id) == "taken"

    @property
    def is_abandoned(self) -> bool:
        return self._registry.lease_state(self._engine_id) == "abandoned"

    def is_awaited(self, run_id: RunId) -> bool:
        reports = self._registry.others.get(self._engine_id, ())
        return any(report.is_in_use and set(report.runs) != {run_id} for report in reports)

    @asynccontextmanager
    async def held(self) -> AsyncIterator[bool]:
        async with self._changing:
            is_ours = await self._registry.take_lease(self._engine_id)
            self._holders += is_ours
        if not is_ours:
            yield False
            return
        renewing = asyncio.create_task(self._renew())
        try:
            yield True
        finally:
            renewing.cancel()
            await asyncio.wait([renewing])
            async with self._changing:
                self._holders -= 1
                if self._holders == 0:
                    with suppress(StoreUnavailable):  # the lease then ends by itself
                        await self._registry.give_lease_back(self._engine_id)

    async def _renew(self) -> None:
        while True:
            # Three attempts before the lease ends: the store may be away for a moment.
            await asyncio.sleep(LEASE_SECONDS / 4)
            with suppress(StoreUnavailable):
                await self._registry.take_lease(self._engine_id)
