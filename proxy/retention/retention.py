"""Retention: the content of sessions that are done with goes after a time, or when there are too many.

What a run keeps is in its settings (`run.retention`). Nothing here needs to be remembered: each sweep looks for what
is overdue, first ended first, marks a bounded number of sessions, and leaves the rest to the next one.
"""

from __future__ import annotations

from functools import partial

from sqlalchemy import Connection

from proxy.clock import Clock
from proxy.database.unit_of_work import Database
from proxy.retention.erasing import EraseService
from proxy.retention.repository import ErasedReason, KeepingRepository
from proxy.runs.service import RunDirectory
from proxy.settings import RetentionSettings

_AT_ONCE = 200
_BATCHES = 5
"""A thousand sessions a sweep: a store that was never swept is not emptied in one go."""
_DAY = 86400.0


class RetentionService:
    """Sweeps all runs."""

    def __init__(self, database: Database, runs: RunDirectory, erasing: EraseService, clock: Clock) -> None:
        self._database = database
        self._runs = runs
        self._erasing = erasing
        self._clock = clock

    async def sweep(self) -> int:
        """Erases what is overdue, up to a bound, and goes on removing the content of what was erased. How many
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
    return KeepingRepository(connection).overdue(
        run_id,
        ended_before=now - kept.max_age_days * _DAY if kept.max_age_days is not None else None,
        beyond=kept.max_sessions,
        unconsumed=kept.unconsumed,
        limit=_AT_ONCE,
    )
