"""Read models of runs, sessions, turns, rewards and steps, and the switches that an operator has.

Wiring (proxy/app.py):

    overview = OverviewService(
        database=database, clock=system_clock, signals=signals, swaps=swaps,
        data_dir=settings.server.data_dir, token_text=template.readable_token,
    )
    app.include_router(proxy.overview.endpoints.router)
    ...
    every LOOK_AHEAD_SECONDS: await overview.look_ahead()
    overview.close()   # when the server begins to stop: event streams do not end by themselves
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

from sqlalchemy import Connection

from proxy.clock import Clock
from proxy.contract.policy import MAX_VERSION
from proxy.contract.states import RunState, TrainingState
from proxy.database.audits import SessionAudit, session_audit
from proxy.database.unit_of_work import Database
from proxy.engines.faults import EngineFaults
from proxy.errors import Conflict, InvalidRequest, NotFound
from proxy.lifecycle.events import append_event
from proxy.lifecycle.signals import Signals
from proxy.lifecycle.trainable import teaching_sessions
from proxy.metrics import LastStep
from proxy.overview import assembly
from proxy.overview.assembly import TokenText
from proxy.overview.figures import RunFigures
from proxy.overview.filters import Cursor, SessionFilter, page_size
from proxy.overview.health import HealthCheck, ServingStatus
from proxy.overview.repository import AnyRow, OverviewRepository
from proxy.overview.rewards.assembly import preference_view, reward_items, used_by
from proxy.overview.rewards.repository import LedgerRepository
from proxy.overview.rewards.service import LedgerOverview
from proxy.overview.steps.service import StepOverview
from proxy.overview.steps.views import StepTokens, StepView
from proxy.overview.views import (
    Curves,
    Health,
    RunList,
    RunSummary,
    SessionItem,
    SessionPage,
    SessionView,
    Snapshot,
    StepPage,
    Trainability,
    TurnView,
)
from proxy.runs.asking import AskedBatches

_POLL_S = 1.0
_GAP_S = 0.5
_HEARTBEAT_S = 15.0
_FIRST_EVENTS = 20
_MAX_EVENTS = 200
_EXPLAINED_BY_TURNS = (TrainingState.PENDING, TrainingState.EXCLUDED)
_VERSION_DIGITS = len(str(MAX_VERSION))


class _SessionRows(NamedTuple):
    """The rows that one session's page shows, read in one transaction."""

    session: AnyRow
    run: AnyRow | None
    turns: Sequence[AnyRow]
    teaches: bool
    audit: SessionAudit | None
    rewards: Sequence[AnyRow]
    trainings: Sequence[AnyRow]
    preferences: Sequence[AnyRow]


def _session_rows(connection: Connection, *, session_id: str) -> _SessionRows:
    repository = OverviewRepository(connection)
    row = repository.session(session_id)
    if row is None:
        raise NotFound(f"there is no session {session_id!r}")
    return _SessionRows(
        session=row,
        run=repository.run(row.run_id),
        turns=repository.turns_of(session_id),
        teaches=bool(teaching_sessions(connection, [session_id])),
        audit=session_audit(connection, row.run_id, row.consumed_by, session_id),
        rewards=repository.rewards_of([session_id]),
        trainings=repository.trainings_of([session_id]),
        preferences=LedgerRepository(connection).preferences_of(session_id),
    )


class OverviewService:
    """Everything raises NotFound for what is not there and StoreUnavailable while the database is down.

    `hold_seconds`: how long costly figures of a run are kept at least; 0 in tests. `elapsed`: a clock that is never
    set back, by which they grow old. `asked`: the last request of each run's trainer.
    `has_weights`: whether the engine has any, so that something can be learnt.
    `serves_unrecorded`: as `HealthCheck` takes it.
    """

    def __init__(
        self,
        *,
        database: Database,
        clock: Clock,
        signals: Signals,
        swaps: ServingStatus | None = None,
        data_dir: Path | None = None,
        token_text: TokenText | None = None,
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
        self._token_text = token_text
        self.ledger = LedgerOverview(database)
        self._steps = StepOverview(database, token_text)
        self._figures = RunFigures(
            database=database,
            clock=clock,
            hold_seconds=hold_seconds,
            elapsed=elapsed,
            asked=asked,
            has_weights=has_weights,
        )
        self._health = HealthCheck(
            database=database,
            clock=clock,
            swaps=swaps,
            data_dir=data_dir,
            faults=faults,
            asked=asked,
            serves_unrecorded=serves_unrecorded,
        )
        self._closed = asyncio.Event()

    def close(self) -> None:
        """Ends all event streams, and what is counted ahead."""
        self._closed.set()
        self._figures.close()

    async def look_ahead(self) -> None:
        """To be called every `LOOK_AHEAD_SECONDS`, from the start on: nobody waits then for what takes long to count,
        and nobody is told figures that are more than a minute old."""
        runs = await self._database.read(lambda connection: OverviewRepository(connection).runs())
        await self._figures.look_ahead(runs)

    async def sessions_by_training(self) -> dict[tuple[str, str], int]:
        """(run name, training state) → sessions, without the states that have none."""
        names = await self._database.read(
            lambda connection: {row.id: row.name for row in OverviewRepository(connection).runs()}
        )
        counted = await self._figures.sessions_by_training()
        return {
            (names[run_id], training): sessions
            for run_id, by_training in counted.items()
            if run_id in names
            for training, sessions in by_training.items()
        }

    async def last_steps(self) -> dict[str, LastStep]:
        """By the run's name. Metrics that the trainer could not tell as finite numbers are left out."""
        rows = await self._database.read(lambda connection: OverviewRepository(connection).last_steps())
        known = {row.name: {name: value for name, value in row.metrics.items() if value is not None} for row in rows}
        return {row.name: LastStep(row.version, row.created_at, known[row.name]) for row in rows}

    def now(self) -> float:
        """The time that everything here is told in."""
        return self._clock()

    # Runs

    async def runs(self) -> RunList:
        rows = await self._database.read(lambda connection: OverviewRepository(connection).runs())
        return RunList(runs=tuple([await self._figures.summary(row) for row in rows]))

    async def run(self, name_or_id: str) -> RunSummary:
        return await self._figures.summary(await self._run_row(name_or_id))

    async def run_id(self, name_or_id: str) -> str:
        """A name wins over an id."""
        return str((await self._run_row(name_or_id)).id)

    async def curves(self, name_or_id: str) -> Curves:
        """The reward of the whole run; the newest 600 versions; the token rate of the last ten minutes, as far back
        as it is known."""
        run = await self._run_row(name_or_id)
        return await self._figures.curves(run.id)

    async def pause(self, name_or_id: str, *, reason: str | None = None) -> RunSummary:
        """The trainer gets no more trajectories of a paused run; agents are served. A reason is a problem that is
        shown until the run goes on. Raises Conflict if archived."""
        return await self._switch(name_or_id, RunState.PAUSED, "run.paused", {"reason": reason} if reason else {})

    async def resume(self, name_or_id: str) -> RunSummary:
        return await self._switch(name_or_id, RunState.ACTIVE, "run.resumed", {})

    async def _switch(self, name_or_id: str, state: RunState, kind: str, data: dict[str, str]) -> RunSummary:
        run = await self._run_row(name_or_id)
        if run.state == RunState.ARCHIVED:
            raise Conflict(f"the run {run.name!r} is archived")

        def switch(connection: Connection) -> None:
            if OverviewRepository(connection).set_run_state(run.id, state.value, unless=RunState.ARCHIVED.value):
                append_event(connection, run_id=run.id, kind=kind, data=data, now=self._clock())

        await self._database.commit(switch)
        self._signals.events.notify()
        self._signals.trajectories.notify()
        return await self.run(run.id)

    async def _run_row(self, name_or_id: str) -> AnyRow:
        row = await self._database.read(lambda connection: OverviewRepository(connection).run(name_or_id))
        if row is None:
            raise NotFound(f"there is no run {name_or_id!r}")
        return row

    # Sessions, turns, rewards

    async def sessions(
        self, name_or_id: str, wanted: SessionFilter, *, cursor: str | None = None, limit: int = 50
    ) -> SessionPage:
        """Return a page of sessions, newest first. Raise InvalidRequest for a text that is not a page's cursor.

        A page of a filtered list goes through some thousand sessions: it may be short, or empty, and still not be the
        last.
        """
        run_id = await self.run_id(name_or_id)
        size = page_size(limit)
        after = Cursor.decode(cursor) if cursor else None

        def read(connection: Connection) -> tuple[Sequence[AnyRow], AnyRow | None, set[str]]:
            repository = OverviewRepository(connection)
            rows = repository.sessions(run_id, wanted, after=after, limit=size + 1)
            is_short = len(rows) <= size and wanted.is_searched
            # Turns cost one query per session, so they are read only where the explanation depends on them.
            unexplained = [row.id for row in rows[:size] if row.training in _EXPLAINED_BY_TURNS]
            searched_to = repository.searched_to(run_id, after) if is_short else None
            return rows, searched_to, teaching_sessions(connection, unexplained)

        rows, searched_to, teaching = await self._database.read(read)
        last: AnyRow | SessionItem | None = searched_to
        items = tuple(assembly.session_item(row, teaches=row.id in teaching) for row in rows[:size])
        if len(rows) > size:
            last = items[-1]
        return SessionPage(
            sessions=items,
            next_cursor=Cursor(at=last.created_at, key=last.id).encode() if last is not None else None,
        )

    async def session(self, session_id: str, *, with_tokens: bool = False) -> SessionView:
        found = await self._database.read(partial(_session_rows, session_id=session_id))
        skipped = found.audit.skipped if found.audit is not None else None
        item = assembly.session_item(found.session, teaches=found.teaches, skipped=skipped)
        views = tuple(self._turn_view(turn, with_tokens) for turn in found.turns)
        return SessionView(
            session=item,
            run=found.run.name if found.run is not None else item.run_id,
            metadata=found.session._mapping["metadata"],
            trainability=Trainability(state=item.training, explanation=item.explanation),
            trained=assembly.trained(item, found.trainings),
            turns=views,
            rewards=tuple(reward_items(found.rewards, used_by(found.trainings))),
            preferences=tuple(preference_view(preference) for preference in found.preferences),
            untrained_turns=assembly.untrained(views, item.purpose, found.audit),
        )

    async def turn(self, turn_id: str, *, with_tokens: bool = False) -> TurnView:
        row = await self._database.read(lambda connection: OverviewRepository(connection).turn(turn_id))
        if row is None:
            raise NotFound(f"there is no turn {turn_id!r}")
        return self._turn_view(row, with_tokens)

    def _turn_view(self, row: AnyRow, with_tokens: bool) -> TurnView:
        return assembly.turn_view(row, with_tokens=with_tokens, text=self._token_text)

    # Steps

    async def steps(self, name_or_id: str, *, cursor: str | None = None, limit: int = 50) -> StepPage:
        """Newest first. The cursor is the last version of the page before; raises InvalidRequest for another."""
        run_id = await self.run_id(name_or_id)
        size = page_size(limit)
        if cursor is not None and not _is_version(cursor):
            raise InvalidRequest("invalid cursor: take `next_cursor` of the previous page", param="cursor")
        below = int(cursor) if cursor else None
        rows = await self._database.read(
            lambda connection: OverviewRepository(connection).versions(run_id, below=below, limit=size + 1)
        )
        # A run without history may be deleted between the two reads: its version 0 then has no facts.
        facts = await self._figures.facts_of(run_id, [row.version for row in rows[:size]])
        return StepPage(
            steps=tuple(assembly.step_item(row, facts[row.version]) for row in rows[:size] if row.version in facts),
            next_cursor=str(rows[size - 1].version) if len(rows) > size else None,
        )

    async def step(self, name_or_id: str, version: int) -> StepView:
        run = await self._run_row(name_or_id)
        return await self._steps.step(run.id, run.name, version)

    async def step_tokens(self, name_or_id: str, version: int) -> StepTokens:
        run = await self._run_row(name_or_id)
        return await self._steps.tokens(run.id, run.name, version)

    # Live

    async def snapshot(self, run_id: str, *, after: int | None) -> Snapshot:
        """`after` None: with the last few events."""
        limit = _FIRST_EVENTS if after is None else _MAX_EVENTS

        def read(connection: Connection) -> tuple[AnyRow | None, Sequence[AnyRow]]:
            repository = OverviewRepository(connection)
            return repository.run(run_id), repository.events(run_id, after=after or 0, limit=limit)

        run, rows = await self._database.read(read)
        if run is None:
            raise NotFound(f"there is no run {run_id!r}")
        events = tuple(assembly.event_item(row) for row in reversed(rows))
        return Snapshot(
            run=await self._figures.summary(run),
            events=events,
            last_event_id=events[-1].id if events else after or 0,
        )

    async def snapshots(self, run_id: str, *, after: int | None = None) -> AsyncIterator[Snapshot | None]:
        """A snapshot at once, then one whenever something changed; None, a sign of life, after 15 quiet seconds.

        Ends with `close`. Woken by the signals of this process; what another process changed is seen within a
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
            await self._change()

    async def _change(self) -> None:
        """Waits for a hint of a change, `_POLL_S` at most and `_GAP_S` at least, or for `close`."""
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

    async def health(self) -> Health:
        """Never raises: what does not work is in the answer."""
        return await self._health.check()


def _is_version(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= _VERSION_DIGITS and int(text) <= MAX_VERSION
