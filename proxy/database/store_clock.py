"""The time by which all proxies and workers of a store act, whatever the clocks of their machines show."""

from __future__ import annotations

import asyncio
import math
import time
from contextlib import suppress
from typing import Self

from sqlalchemy import Connection

from proxy.clock import Clock, system_clock
from proxy.database.now import database_now
from proxy.database.unit_of_work import Database
from proxy.errors import StoreUnavailable

# Quartz drifts by less than 0.1 ms a second, so clocks stay within some milliseconds of each other.
_FOLLOW_SECONDS = 60.0
# A step back of the server's clock by more than this is followed. During a shorter one this clock stands still, so
# that no time-out becomes negative.
_STANDS_STILL_SECONDS = 60.0


class StoreClock:
    """PostgreSQL's time, which this machine's monotonic clock carries on; on SQLite the machine's own clock.

    Every proxy compares leases, time-outs and limits that other proxies wrote with its clock. With the clocks of
    their machines, one that is ahead by a lease would end all leases of the others, and no step would be committed.
    All proxies on a SQLite file run on one machine.
    """

    def __init__(self, database: Database, machine: Clock = system_clock, steady: Clock = time.monotonic) -> None:
        self._database = database
        self._machine = machine
        self._steady = steady
        self._offset: float | None = None
        """The server's time less `steady`; None for the machine's clock."""
        self._last = -math.inf

    @classmethod
    async def open(cls, database: Database, machine: Clock = system_clock) -> Self:
        """Return a clock that shows the server's time. Raises StoreUnavailable."""
        clock = cls(database, machine)
        await clock.follow()
        return clock

    def __call__(self) -> float:
        if self._offset is None:
            return self._machine()
        now = self._steady() + self._offset
        if now < self._last <= now + _STANDS_STILL_SECONDS:
            return self._last
        self._last = now
        return now

    async def follow(self) -> None:
        """Ask PostgreSQL for its time. Raises StoreUnavailable."""
        if self._database.url.get_backend_name() == "sqlite":
            return

        def ask(connection: Connection) -> tuple[float, float, float]:
            asked_at = self._steady()
            return asked_at, database_now(connection, self._machine), self._steady()

        asked_at, server, answered_at = await self._database.read(ask)
        # The server read its clock between the two: an answer that took long says little, and changes little.
        least, most = server - answered_at, server - asked_at
        self._offset = least if self._offset is None else min(max(self._offset, least), most)

    async def run(self) -> None:
        """Follow the server's clock until cancelled."""
        while True:
            await asyncio.sleep(_FOLLOW_SECONDS)
            with suppress(StoreUnavailable):  # the monotonic clock goes on meanwhile
                await self.follow()
