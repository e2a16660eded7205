"""Reads all runs at a glance with a number of queries that does not grow with the number of runs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from sqlalchemy import Connection

from proxy.bounded_cache import BoundedCache
from proxy.contract.states import RunState, TrainingState
from proxy.database.rows import AnyRow
from proxy.database.unit_of_work import Database
from proxy.overview.board.repository import BoardRepository
from proxy.overview.board.views import RunGlance
from proxy.overview.figure_cache import FigureCache
from proxy.overview.steps.assembly import stored_step_facts
from proxy.overview.totals import NO_TOTALS, RunTotals, StoreTotals
from proxy.overview.views import REWARD_WINDOW
from proxy.runs.repository import RunRepository

MAX_POINTS = 32
"""Points of a run's small curve: it is about a hundred pixels wide."""

# How many of the last ended sessions of a run are searched for rewarded ones. Less than for a run's own page, as
# hundreds of runs are searched at once.
_SEARCHED_FOR_REWARDS = 512
_CACHED_STALENESS = 4096


class RunBoard:
    """Reads `RunGlance` of all runs. Rewards are cached in proportion to what reading them cost."""

    def __init__(self, database: Database, totals: StoreTotals, cache: FigureCache) -> None:
        self._database = database
        self._totals = totals
        self._cache = cache
        # The audit of a version never changes, so its staleness is computed once.
        self._staleness: BoundedCache[tuple[str, int], tuple[float | None]] = BoundedCache(_CACHED_STALENESS)

    async def glances(self, *, with_archived: bool = False) -> tuple[RunGlance, ...]:
        """Return the runs, the newest first. Archived runs are left out unless `with_archived`."""
        rows = await self._database.read(lambda connection: RunRepository(connection).all_by_age())
        shown = [row for row in reversed(rows) if with_archived or row.state != RunState.ARCHIVED]
        rewards = await self._cache.get(
            ("last rewards", with_archived), lambda: self._last_rewards(with_archived), may_be_stale=_is_long
        )
        staleness = await self._staleness_of([(row.id, row.head_version) for row in shown if row.head_version])
        # Last, as it may start a background count that would compete with the other queries.
        totals = await self._totals.by_run()
        return tuple(
            _glance(row, totals.get(row.id, NO_TOTALS), rewards.get(row.id, ()), staleness.get(row.id))
            for row in shown
        )

    async def _last_rewards(self, with_archived: bool) -> dict[str, list[float]]:
        def read(connection: Connection) -> dict[str, list[float]]:
            return BoardRepository(connection).last_rewards(
                count=REWARD_WINDOW, searched=_SEARCHED_FOR_REWARDS, with_archived=with_archived
            )

        return await self._database.read(read)

    async def _staleness_of(self, heads: Sequence[tuple[str, int]]) -> dict[str, float | None]:
        """Return the mean staleness of the tokens trained in these versions, by run."""
        known = {head: self._staleness.get(head) for head in heads}
        unknown = [head for head, found in known.items() if found is None]
        if unknown:
            for head, audit in (await self._database.read(partial(_audits, unknown))).items():
                staleness = (stored_step_facts(audit).staleness_mean,)
                known[head] = staleness
                self._staleness.put(head, staleness)
        return {run_id: found[0] for (run_id, _), found in known.items() if found is not None}


def _audits(versions: Sequence[tuple[str, int]], connection: Connection) -> dict[tuple[str, int], str]:
    return BoardRepository(connection).audits(versions)


def _is_long(rewards: dict[str, list[float]]) -> bool:
    """Return whether there are so many rewards that nobody should wait for them to be read again."""
    return sum(map(len, rewards.values())) > 50 * REWARD_WINDOW


def _glance(row: AnyRow, totals: RunTotals, rewards: Sequence[float], staleness: float | None) -> RunGlance:
    return RunGlance(
        id=row.id,
        name=row.name,
        state=row.state,
        base_model=row.base_model,
        created_at=row.created_at,
        head_version=row.head_version,
        serving_version=row.serving_version,
        session_count=totals.session_count,
        waiting=totals.sessions.get(TrainingState.READY, 0),
        rewards=condensed(rewards),
        mean_reward=sum(rewards) / len(rewards) if rewards else None,
        staleness_mean=staleness,
        last_activity_at=totals.last_activity_at,
        project_id=row.project_id,
        project=row.project,
    )


def condensed(rewards: Sequence[float]) -> tuple[float, ...]:
    """Return means of consecutive groups of equal size, at most `MAX_POINTS` of them; the first may be smaller."""
    size = -(-len(rewards) // MAX_POINTS) or 1
    # Groups are counted from the newest reward, so that a new one does not make the whole curve move as often.
    groups = [rewards[max(0, end - size) : end] for end in range(len(rewards), 0, -size)]
    return tuple(sum(group) / len(group) for group in reversed(groups))
