"""The slots of an engine: how many generations it is given at once, and which waiting one is next."""

from __future__ import annotations

import asyncio
import math
import time

from proxy.clock import Clock
from proxy.engines.activity import EngineActivity
from proxy.engines.fair_queue import FairQueue, FairShare
from proxy.engines.spare import SpareCapacity, SpareSlot

# Generations that the engine is given beyond those that it runs, as a share of these. It begins the next one as soon
# as one ends, instead of waiting for the proxy. The engine serves them in the order in which they came, whatever
# their runs, so a larger share would weaken the fair shares.
_AHEAD = 0.125


class EngineSlots:
    """The permission for up to `count` generations to be at an engine at once. Further ones wait, in fair shares by
    run.

    Generations that wait do not count as activity. `elapsed` is a monotonic clock.
    """

    def __init__(self, count: int, activity: EngineActivity, elapsed: Clock = time.monotonic) -> None:
        self._most = self._count = count
        self._taken = 0
        self._activity = activity
        self._elapsed = elapsed
        self._queue: FairQueue[asyncio.Future[float]] = FairQueue()
        self._spare = SpareCapacity()

    @property
    def count(self) -> int:
        """The number of slots."""
        return self._count

    @property
    def waiting(self) -> bool:
        """Whether any generation waits for a slot."""
        return bool(self._queue)

    def fit(self, running: int | None) -> None:
        """Set the number of slots for an engine that runs `running` generations at once; None: it does not report it.

        Generations beyond that number would wait inside the engine, which knows no runs. The number that the slots
        were made with is never exceeded.
        """
        wanted = self._most if running is None else min(self._most, running + math.ceil(running * _AHEAD))
        if wanted != self._count:
            self._count = max(1, wanted)
            self._grant()
            self._changed()

    def slot(self, share: FairShare) -> Slot:
        """Return a context manager that waits for a slot and holds it."""
        return Slot(self, share)

    def spare(self, busy_share: float) -> SpareSlot:
        """Return a context manager for a generation that nobody waits for (`engines.spare`).

        It begins only while calls hold at most `busy_share` of the slots and none waits, and is ended by TimeoutError
        when they hold more.
        """
        return SpareSlot(self._spare, self._activity, busy_share, self._changed)

    def _changed(self) -> None:
        self._spare.adjust(taken=self._taken, count=self._count, calls_wait=bool(self._queue))

    async def _wait(self, share: FairShare) -> float:
        """Wait for a slot; return the run's charge for it."""
        waiter: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._queue.push(share, waiter)
        try:
            return await waiter
        except asyncio.CancelledError:
            if waiter.cancelled():
                self._queue.remove(share, waiter)
            else:  # the slot was granted in the same moment: it is for the next one
                self._give_back(share, waiter.result(), None)
            raise

    def _give_back(self, share: FairShare, charge: float, seconds: float | None) -> None:
        self._queue.end(share, charge, seconds)
        self._taken -= 1
        if self._queue:
            self._grant()
        if self._spare:
            self._changed()

    def _grant(self) -> None:
        """Give the free slots to the generations that wait."""
        while self._taken < self._count and self._queue:
            waiter, share, charge = self._queue.pop()
            if waiter.cancelled():  # its task has not run since, and would have removed it
                self._queue.end(share, charge, None)
                continue
            self._taken += 1
            waiter.set_result(charge)


class Slot:
    """One generation's slot, for `async with`."""

    def __init__(self, slots: EngineSlots, share: FairShare) -> None:
        self._slots = slots
        self._share = share
        self._charge = 0.0
        self._since = 0.0

    async def __aenter__(self) -> None:
        slots = self._slots
        if slots._taken < slots._count:  # then nobody waits
            slots._taken += 1
            self._charge = slots._queue.start(self._share)
        else:
            self._charge = await slots._wait(self._share)
        if slots._spare:
            slots._changed()
        slots._activity.begin()
        self._since = slots._elapsed()

    async def __aexit__(self, *raised: object) -> None:
        slots = self._slots
        slots._activity.end()
        slots._give_back(self._share, self._charge, slots._elapsed() - self._since)
