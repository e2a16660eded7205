"""Retention: erase sessions that are too old or too many, by the run's settings (`run.retention`).

A sweep keeps no state: it finds overdue sessions, oldest end first, erases a bounded number of them and leaves the
rest to the next sweep. The scheduled job (`proxy/job_kinds.py`) sweeps until nothing is overdue.
"""

from __future__ import annotations

import asyncio
from functools import partial

from sqlalchemy import Connection

from proxy.clock import Clock
from proxy.database.unit_of_work import Database
from proxy.retention.eraser import SessionEraser
from proxy.retention.repository import ErasedReason, ErasureRepository
from proxy.runs.service import RunDirectory
from proxy.settings import RetentionSettings

_AT_ONCE = 200
# At most a thousand sessions a sweep, then a pause: a large store must not block other writes for minutes.
_BATCHES = 5
_DAY = 86400.0
_PAUSE_SECONDS = 0.2


class RetentionService:
    """Erases overdue sessions of all runs."""

    def __init__(self, database: Database, runs: RunDirectory, erasing: SessionEraser, clock: Clock) -> None:
        self._database = database
        self._runs = runs
        self._erasing = erasing
        self._clock = clock

    async def sweep_all(self) -> int:
        """Sweep until nothing is overdue. Return how many sessions were erased."""
        erased = 0
        while some := await self.sweep():
            erased += some
            await asyncio.sleep(_PAUSE_SECONDS)
        return erased

    async def sweep(self) -> int:
        """Erase overdue sessions, up to a bound, and continue deleting the content of erased ones. Return how many
        sessions were erased."""
        erased = 0
        for run in await self._runs.list_():
            kept = run.settings.retention
            if kept.max_age_days is None and kept.max_sessions is None:
                continue
            for _ in range(_BATCHES):
                overdue = await self._database.read(partial(_overdue, run.id, kept, self._clock()))
                erased += await self._erasing.mark(overdue, ErasedReason.RETENTION, by="retention")
                if len(overdue) < _AT_ONCE:
                    break
        await self._erasing.empty()
        return erased


def _overdue(run_id: str, kept: RetentionSettings, now: float, connection: Connection) -> list[str]:
    return ErasureRepository(connection).overdue(
        run_id,
        ended_before=now - kept.max_age_days * _DAY if kept.max_age_days is not None else None,
        beyond=kept.max_sessions,
        unconsumed=kept.unconsumed,
        limit=_AT_ONCE,
    )
