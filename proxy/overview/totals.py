"""Figures that need a walk over the sessions of all runs, counted together and cached."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
from sqlalchemy import Connection

from proxy.database.rows import AnyRow
from proxy.database.unit_of_work import Database
from proxy.overview.figure_cache import FigureCache
from proxy.overview.repository import OverviewRepository
from proxy.overview.steps.repository import StepOverviewRepository

# Up to this many sessions, figures that need a walk over all sessions are counted on request; beyond, they may be
# stale.
LARGE = 20_000


class RunTotals(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of one run that need a walk over all sessions. `sessions` counts them by training state."""

    sessions: dict[str, int]
    turns: int
    last_activity_at: float | None
    swaps: int

    @property
    def session_count(self) -> int:
        return sum(self.sessions.values())


NO_TOTALS = RunTotals(sessions={}, turns=0, last_activity_at=None, swaps=0)


class StoreTotals:
    """Counts and caches the totals of all runs; they are current while the store has at most `LARGE` sessions."""

    def __init__(self, database: Database, cache: FigureCache) -> None:
        self._database = database
        self._cache = cache

    async def by_run(self, *, fresh: bool = False) -> dict[str, RunTotals]:
        """Return the totals by run id; runs without sessions and swaps are omitted. `fresh` is that of
        `FigureCache.get`."""
        return await self._cache.get("totals", self._count, may_be_stale=_is_large, fresh=fresh)

    async def of_run(self, run_id: str) -> RunTotals:
        return (await self.by_run()).get(run_id, NO_TOTALS)

    async def _count(self) -> dict[str, RunTotals]:
        def read(connection: Connection) -> tuple[Sequence[AnyRow], dict[str, int]]:
            return OverviewRepository(connection).counted(), StepOverviewRepository(connection).swap_counts()

        rows, swaps = await self._database.read(read)
        by_run: dict[str, list[AnyRow]] = {run_id: [] for run_id in swaps}
        for row in rows:
            by_run.setdefault(row.run_id, []).append(row)
        return {
            run_id: RunTotals(
                sessions={row.training: row.sessions for row in counted},
                turns=sum(int(row.turns) for row in counted),
                last_activity_at=max((row.last_active_at for row in counted), default=None),
                swaps=swaps.get(run_id, 0),
            )
            for run_id, counted in by_run.items()
        }


def _is_large(totals: Mapping[str, RunTotals]) -> bool:
    return sum(of_run.session_count for of_run in totals.values()) > LARGE
