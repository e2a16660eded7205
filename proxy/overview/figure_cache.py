"""A cache of figures that are costly to count: each is recomputed as seldom as its cost demands."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Hashable
from typing import Any, TypeVar, cast

import msgspec

from proxy.clock import Clock

_Figure = TypeVar("_Figure")

# A figure that took t seconds is cached for 20 t: watching a page costs at most a twentieth of one core.
_COST_FACTOR = 20.0

# A stale figure is returned until it is this much older than its cost allows.
_MOST_AGE_S = 60.0


class _Entry(msgspec.Struct, frozen=True):
    """A figure, the time `at` when its computation began, and the `seconds` that it took."""

    value: Any
    at: float
    seconds: float

    def is_due(self, now: float, hold_seconds: float) -> bool:
        """Return whether it is time to recompute the figure."""
        return now - self.at >= max(hold_seconds, (1 + _COST_FACTOR) * self.seconds)

    def is_too_old(self, now: float) -> bool:
        return now - self.at > _MOST_AGE_S + _COST_FACTOR * self.seconds


def _never(_figure: Any) -> bool:
    return False


class FigureCache:
    """Figures by key, each cached for at least `hold_seconds`, measured with `elapsed`, a monotonic clock."""

    def __init__(self, hold_seconds: float, elapsed: Clock = time.monotonic) -> None:
        self._hold_seconds = hold_seconds
        self._elapsed = elapsed
        self._entries: dict[Hashable, _Entry] = {}
        # One per key, so that many concurrent requests cause one computation.
        self._locks: dict[Hashable, asyncio.Lock] = {}
        self._refreshes: dict[Hashable, asyncio.Task[None]] = {}

    async def get(
        self,
        key: Hashable,
        compute: Callable[[], Awaitable[_Figure]],
        *,
        may_be_stale: Callable[[_Figure], bool] = _never,
        fresh: bool = False,
    ) -> _Figure:
        """Return a figure, from the cache unless it is due.

        With `fresh`, the computation must begin after this call. If the cached figure `may_be_stale`, return it even
        then and refresh it in the background, until it is a minute too old.
        """
        asked, known = self._elapsed(), self._entries.get(key)
        if known is not None and may_be_stale(known.value) and not known.is_too_old(asked):
            if known.is_due(asked, self._hold_seconds) and key not in self._refreshes:
                task = asyncio.create_task(self._refresh(key, compute), name=f"refresh of figures {key}")
                self._refreshes[key] = task
            return cast("_Figure", known.value)
        async with self._locks.setdefault(key, asyncio.Lock()):
            now, known = self._elapsed(), self._entries.get(key)
            if known is not None and (
                known.at > asked
                or (not fresh and not known.is_due(now, self._hold_seconds))
                or (may_be_stale(known.value) and not known.is_too_old(now))
            ):
                return cast("_Figure", known.value)
            return await self._compute(key, compute)

    def close(self) -> None:
        """Cancel the background refreshes."""
        for task in self._refreshes.values():
            task.cancel()

    async def _compute(self, key: Hashable, compute: Callable[[], Awaitable[_Figure]]) -> _Figure:
        began = self._elapsed()
        figure = await compute()
        # The first computation also opens connections and compiles statements, so its time is no measure of the cost.
        seconds = self._elapsed() - began if key in self._entries else 0.0
        self._entries[key] = _Entry(figure, began, seconds)
        return figure

    async def _refresh(self, key: Hashable, compute: Callable[[], Awaitable[Any]]) -> None:
        try:
            async with self._locks.setdefault(key, asyncio.Lock()):
                await self._compute(key, compute)
        except Exception:  # noqa: BLE001  (nobody awaits this task: the next request computes anew and gets the error)
            self._entries.pop(key, None)
        finally:
            del self._refreshes[key]
