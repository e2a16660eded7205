"""Remember invalid replies of engines for as long as operators should see them."""

from __future__ import annotations

import msgspec

from proxy.bounded_cache import BoundedCache
from proxy.clock import Clock

# How long the health check reports a fault: long enough to be seen, short enough to notice a repair.
_SHOWN_SECONDS = 600.0
# A bound in principle: engines' addresses come from the configuration.
_ENGINES = 64


class EngineFault(msgspec.Struct, frozen=True, kw_only=True):
    """The `count` of invalid replies of one engine, each within ten minutes of the one before, and the last
    reason."""

    engine: str
    count: int
    reason: str
    at: float


class EngineFaults:
    """The invalid replies of all engines. Model calls record them, the health check reads them."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._faults: BoundedCache[str, EngineFault] = BoundedCache(_ENGINES)

    def note(self, engine: str, reason: str) -> None:
        """Record an invalid reply."""
        now = self._clock()
        before = self._faults.get(engine)
        count = before.count if before is not None and now - before.at <= _SHOWN_SECONDS else 0
        self._faults.put(engine, EngineFault(engine=engine, count=count + 1, reason=reason, at=now))

    def recent(self) -> list[EngineFault]:
        """Return the faults of the last ten minutes, one for each engine."""
        since = self._clock() - _SHOWN_SECONDS
        return [fault for _, fault in self._faults.items() if fault.at >= since]
