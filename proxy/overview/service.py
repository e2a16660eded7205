"""Read models of runs, sessions, turns, rewards and steps.

The proxy calls `refresh_figures` every `REFRESH_SECONDS`, and `close` when the server begins to stop, as event
streams do not end by themselves.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from pathlib import Path

from sqlalchemy import Connection

from proxy.clock import Clock
from proxy.contract.policy import MAX_VERSION
from proxy.database.rows import AnyRow
from proxy.database.unit_of_work import Database
from proxy.engines.faults import EngineFaults
from proxy.errors import InvalidRequest, NotFound
from proxy.lifecycle.signals import Signals
from proxy.metrics import LastStep
from proxy.overview.board.service import RunBoard
from proxy.overview.figures import RunFigures
from proxy.overview.filters import SessionFilter, page_size
from proxy.overview.health import HealthCheck, ServingStatus
from proxy.overview.log.service import EventLog
from proxy.overview.repository import OverviewRepository
from proxy.overview.review.service import ReviewQueue
from proxy.overview.rewards.service import LedgerOverview
from proxy.overview.sessions.assembly import TokenTextOf
from proxy.overview.sessions.service import SessionOverview
from proxy.overview.sessions.views import SessionPage, SessionView, TurnView
from proxy.overview.steps.assembly import step_item
from proxy.overview.steps.repository import StepOverviewRepository
from proxy.overview.steps.service import StepOverview
from proxy.overview.steps.views import StepPage, StepTokens, StepView
from proxy.overview.versions.service import VersionComparison
from proxy.overview.versions.views import VersionDiff
from proxy.overview.views import Curves, EngineView, EventItem, Health, RunList, RunSummary, Snapshot
from proxy.runs.asking import AskedBatches
from proxy.runs.repository import RunRepository

# A stream reads the store at least every second, to see changes of other processes, and at most twice a second.
_POLL_S = 1.0
_GAP_S = 0.5
# Gateways close streams that are silent for longer; 30 seconds is a common limit.
_HEARTBEAT_S = 15.0
_FIRST_EVENTS = 20
_MAX_EVENTS = 200
_VERSION_DIGITS = len(str(MAX_VERSION))


class OverviewService:
    """Reads everything that the operating API and the admin page show.

    Every method but `health` raises NotFound for an unknown run, session or turn, and StoreUnavailable while the
    database is down.

    `hold_seconds` is how long costly figures of a run are cached at least, measured with `elapsed`, a monotonic
    clock. `asked` has the last request of each run's trainer. `has_weights` is False for an engine that cannot learn.
    `serves_unrecorded` is explained at `HealthCheck`.
    """

    def __init__(
        self,
        *,
        database: Database,
        clock: Clock,
        signals: Signals,
        engines: ServingStatus | None = None,
        data_dir: Path | None = None,
        token_text: TokenTextOf | None = None,
        faults: EngineFaults | None = None,
        hold_seconds: float = 0.5,
        elapsed: Clock = time.monotonic,
        asked: AskedBatches | None = None,
        has_weights: bool = True,
        serves_unrecorded: bool = False,
    ) -> None:
        self._database = database
        self._clock = clock
        self._signals = signals
        self.ledger = LedgerOverview(database)
        self.review = ReviewQueue(database)
        self._sessions = SessionOverview(database, token_text)
        self._steps = StepOverview(database, token_text)
        self._versions = VersionComparison(database)
        self._figures = RunFigures(
            database=database,
            clock=clock,
            hold_seconds=hold_seconds,
            elapsed=elapsed,
            asked=asked,
            has_weights=has_weights,
        )
        self.board = RunBoard(database, self._figures.totals, self._figures.cache)
        self.log = EventLog(database)
        self._health = HealthCheck(
            database=database,
            clock=clock,
            engines=engines,
            data_dir=data_dir,
            faults=faults,
            asked=asked,
            serves_unrecorded=serves_unrecorded,
        )
        self._engines = engines
        self._closed = asyncio.Event()

    def close(self) -> None:
        """End all event streams and background counts."""
        self._closed.set()
        self._figures.close()

    async def refresh_figures(self) -> None:
        """Refresh costly figures. Called every `LOOK_AHEAD_SECONDS`, it spares clients the wait for them, and no
        figure shown is older than a minute."""
        runs = await self._database.read(lambda connection: RunRepository(connection).all_by_age())
        await self._figures.refresh(runs)

    async def sessions_by_training(self) -> dict[tuple[str, str], int]:
        """Count sessions by (run name, training state); states without sessions are omitted."""
        names = await self._database.read(
            lambda connection: {row.id: row.name for row in RunRepository(connection).all_by_age()}
        )
        counted = await self._figures.sessions_by_training()
        return {
            (names[run_id], training): sessions
            for run_id, by_training in counted.items()
            if run_id in names
            for training, sessions in by_training.items()
        }

    async def last_steps(self) -> dict[str, LastStep]:
        """Return the newest step of each run by name. Metrics that were not finite are omitted."""
        rows = await self._database.read(lambda connection: StepOverviewRepository(connection).last_steps())
        known = {row.name: {name: value for name, value in row.metrics.items() if value is not None} for row in rows}
        return {row.name: LastStep(row.version, row.created_at, known[row.name]) for row in rows}

    def now(self) -> float:
        """Return the time, in seconds since the epoch, of the clock that stamps all rows."""
        return self._clock()

    # Runs

    async def runs(self, project_id: str | None = None) -> RunList:
        """Return all runs, or those of a project."""
        rows = await self._database.read(lambda connection: RunRepository(connection).all_by_age(project_id))
        return RunList(runs=tuple([await self._figures.summary(row) for row in rows]))

    async def run_ids(self, project_id: str) -> tuple[str, ...]:
        """Return the ids of a project's runs."""
        rows = await self._database.read(lambda connection: RunRepository(connection).all_by_age(project_id))
        return tuple(row.id for row in rows)

    async def run(self, name_or_id: str) -> RunSummary:
        return await self._figures.summary(await self._run_row(name_or_id))

    async def run_id(self, name_or_id: str) -> str:
        """Return the id of a run given by name or id; a name wins over an id."""
        return str((await self._run_row(name_or_id)).id)

    async def owned_run(self, name_or_id: str) -> AnyRow:
        """Return the row of a run, with its `id`, `name` and `project_id`. Raise NotFound."""
        return await self._run_row(name_or_id)

    async def owner_of(self, run_id: str) -> AnyRow:
        """Return the row of the run with this id, as `owned_run` does; a name never counts. Raise NotFound."""
        row = await self._database.read(lambda connection: RunRepository(connection).by_id(run_id))
        if row is None:
            raise NotFound(f"there is no run {run_id!r}")
        return row

    async def curves(self, name_or_id: str) -> Curves:
        """Return the reward curve of the whole run, the newest 600 versions, and the token rate of the last ten
        minutes, as far back as it is known."""
        run = await self._run_row(name_or_id)
        return await self._figures.curves(run.id)

    async def _run_row(self, name_or_id: str) -> AnyRow:
        row = await self._database.read(lambda connection: RunRepository(connection).by_name_or_id(name_or_id))
        if row is None:
            raise NotFound(f"there is no run {name_or_id!r}")
        return row

    # Sessions and turns

    async def sessions(
        self, name_or_id: str, wanted: SessionFilter, *, cursor: str | None = None, limit: int = 50
    ) -> SessionPage:
        """Return a page of a run's sessions, newest first. Raise InvalidRequest for an invalid cursor."""
        return await self._sessions.page(await self.run_id(name_or_id), wanted, cursor=cursor, limit=limit)

    async def session(self, session_id: str, *, with_tokens: bool = False) -> SessionView:
        return await self._sessions.session(session_id, with_tokens=with_tokens)

    async def turn(self, turn_id: str, *, with_tokens: bool = False) -> TurnView:
        return await self._sessions.turn(turn_id, with_tokens=with_tokens)

    # Steps

    async def steps(self, name_or_id: str, *, cursor: str | None = None, limit: int = 50) -> StepPage:
        """Return a page of a run's versions, newest first. Raise InvalidRequest for an invalid cursor."""
        run_id = await self.run_id(name_or_id)
        size = page_size(limit)
        if cursor is not None and not _is_version(cursor):
            raise InvalidRequest("invalid cursor: take `next_cursor` of the previous page", param="cursor")
        below = int(cursor) if cursor else None
        rows = await self._database.read(
            lambda connection: StepOverviewRepository(connection).versions(run_id, below=below, limit=size + 1)
        )
        # A run without history may be deleted between the two reads: its version 0 then has no facts.
        facts = await self._figures.facts_of(run_id, [row.version for row in rows[:size]])
        return StepPage(
            steps=tuple(step_item(row, facts[row.version]) for row in rows[:size] if row.version in facts),
            next_cursor=str(rows[size - 1].version) if len(rows) > size else None,
        )

    async def step(self, name_or_id: str, version: int) -> StepView:
        run = await self._run_row(name_or_id)
        return await self._steps.step(run.id, run.name, version)

    async def compare_versions(self, name_or_id: str, before: int, after: int, *, limit: int) -> VersionDiff:
        """Compare a version with a later one (`VersionComparison.compare`). Raise InvalidRequest."""
        run = await self._run_row(name_or_id)
        return await self._versions.compare(run.id, run.name, before, after, limit=limit)

    async def step_tokens(self, name_or_id: str, version: int) -> StepTokens:
        run = await self._run_row(name_or_id)
        return await self._steps.tokens(run.id, run.name, version)

    # Live

    async def snapshot(self, run_id: str, *, after: int | None) -> Snapshot:
        """Return a run with the events after the id `after`, or with the last few events if it is None."""
        limit = _FIRST_EVENTS if after is None else _MAX_EVENTS

        def read(connection: Connection) -> tuple[AnyRow | None, Sequence[AnyRow]]:
            run = RunRepository(connection).by_id(run_id)
            return run, OverviewRepository(connection).events(run_id, after=after or 0, limit=limit)

        run, rows = await self._database.read(read)
        if run is None:
            raise NotFound(f"there is no run {run_id!r}")
        events = tuple(
            EventItem(id=row.id, kind=row.kind, data=row.data, created_at=row.created_at) for row in reversed(rows)
        )
        return Snapshot(
            run=await self._figures.summary(run),
            events=events,
            last_event_id=events[-1].id if events else after or 0,
        )

    async def snapshots(self, run_id: str, *, after: int | None = None) -> AsyncIterator[Snapshot | None]:
        """Yield a snapshot at once and after every change, and None as a heartbeat after 15 quiet seconds.

        The stream ends with `close`. Signals of this process wake it; it sees changes of other processes within a
        second.
        """
        last: Snapshot | None = None
        sent_at = time.monotonic()
        while not self._closed.is_set():
            snapshot = await self.snapshot(run_id, after=after)
            if last is None or snapshot.events or snapshot.run != last.run:
                last, after, sent_at = snapshot, snapshot.last_event_id, time.monotonic()
                yield snapshot
            elif time.monotonic() - sent_at >= _HEARTBEAT_S:
                sent_at = time.monotonic()
                yield None
            await self._wait_for_change()

    async def _wait_for_change(self) -> None:
        """Wait for a signal of a change, at least `_GAP_S` and at most `_POLL_S` seconds, or for `close`."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._closed.wait(), _GAP_S)
            return
        signals = (self._signals.events, self._signals.versions, self._signals.trajectories)
        waits = [asyncio.ensure_future(signal.wait(_POLL_S - _GAP_S)) for signal in signals]
        waits.append(asyncio.ensure_future(self._closed.wait()))
        try:
            await asyncio.wait(waits, timeout=_POLL_S - _GAP_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)

    # Health

    def engines(self) -> tuple[EngineView, ...]:
        """Return the engines as of the last health interval, oldest first."""
        return () if self._engines is None else self._engines.views()

    async def health(self) -> Health:
        """Return the health view. Never raise: the view lists what does not work."""
        return await self._health.check()

    async def recent_health(self) -> Health:
        """Return the health view of some moment in the last seconds, for pages that load every few seconds."""
        return await self._figures.cache.get("health", self._health.check)


def _is_version(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= _VERSION_DIGITS and int(text) <= MAX_VERSION
