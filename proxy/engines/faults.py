"""Invalid replies of engines, kept for as long as an operator should hear of them."""

from __future__ import annotations

import msgspec

from proxy.bounded_cache import BoundedCache
from proxy.clock import Clock

_SHOWN_SECONDS = 600.0
_ENGINES = 64
"""Engines that are remembered: their addresses come from the configuration, so this is never reached in practice."""


class EngineFault(msgspec.Struct, frozen=True, kw_only=True):
    """How often an engine sent invalid replies in a row of which none is older than ten minutes, and the last one."""

    engine: str
    count: int
    reason: str
    at: float


class EngineFaults:
    """Filled by model calls, read by the health check."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._faults: BoundedCache[str, EngineFault] = BoundedCache(_ENGINES)

    def note(self, engine: str, reason: str) -> None:
        now = self._clock()
        before = self._faults.get(engine)
        count = before.count if before is not None and now - before.at <= _SHOWN_SECONDS else 0
        self._faults.put(engine, EngineFault(engine=engine, count=count + 1, reason=reason, at=now))

    def recent(self) -> list[EngineFault]:
        """The faults of the last ten minutes, by engine."""
        since = self._clock() - _SHOWN_SECONDS
        return [fault for _, fault in self._faults.items() if fault.at >= since]
