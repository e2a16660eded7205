"""Generations in an engine's spare capacity: no call waits for them, and they end when calls need the engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType

from proxy.engines.activity import EngineActivity


class SpareCapacity:
    """The spare generations at one engine: those that run, and those that wait for room, oldest first."""

    def __init__(self) -> None:
        self._waiting: dict[SpareSlot, asyncio.Future[None]] = {}
        self._running: dict[SpareSlot, None] = {}

    def __bool__(self) -> bool:
        """Whether any spare generation runs or waits, so that changes at the engine matter."""
        return bool(self._waiting or self._running)

    def adjust(self, *, taken: int, count: int, calls_wait: bool) -> None:
        """End the generations for which there is no room any more, the newest first, and begin those for which there
        is.

        `taken` of the engine's `count` slots are held by calls. `calls_wait`: further calls wait for a slot.
        """

        def has_room(slot: SpareSlot, others: int) -> bool:
            return not calls_wait and taken + others < count and taken <= slot.busy_share * count

        for slot in reversed(list(self._running)):
            if not has_room(slot, len(self._running) - 1):
                del self._running[slot]
                slot.revoke()
        for slot, begins in list(self._waiting.items()):
            if has_room(slot, len(self._running)):
                del self._waiting[slot]
                self._running[slot] = None
                begins.set_result(None)

    async def wait(self, slot: SpareSlot, changed: Callable[[], None]) -> None:
        """Wait until there is room for the slot's generation. `changed` calls `adjust` with the present figures."""
        begins = self._waiting[slot] = asyncio.get_running_loop().create_future()
        changed()
        try:
            await begins
        except asyncio.CancelledError:
            self._waiting.pop(slot, None)
            self._running.pop(slot, None)
            changed()
            raise

    def end(self, slot: SpareSlot) -> None:
        """Remove a generation that has ended."""
        self._running.pop(slot, None)


class SpareSlot:
    """The room for one spare generation, for `async with`. The body is ended by TimeoutError when calls need it."""

    def __init__(
        self, capacity: SpareCapacity, activity: EngineActivity, busy_share: float, changed: Callable[[], None]
    ) -> None:
        self.busy_share = busy_share
        self._capacity = capacity
        self._activity = activity
        self._changed = changed
        self._limit = asyncio.timeout(None)
        self._is_entered = False
        self.revoked = False
        """Whether calls have needed the engine."""

    @property
    def is_running(self) -> bool:
        """Whether the body has begun and no call has needed the engine since."""
        return self._is_entered and not self.revoked

    def revoke(self) -> None:
        """End the body."""
        self.revoked = True
        if self._is_entered:
            self._limit.reschedule(asyncio.get_running_loop().time())

    async def __aenter__(self) -> None:
        await self._capacity.wait(self, self._changed)
        await self._limit.__aenter__()
        self._is_entered = True
        self._activity.begin()
        if self.revoked:  # calls came between the grant and this moment
            self.revoke()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._activity.end()
        self._capacity.end(self)
        self._changed()
        # A body that ended in the moment of the revocation is complete: the pending cancellation is taken back.
        await self._limit.__aexit__(kind, error, trace)
