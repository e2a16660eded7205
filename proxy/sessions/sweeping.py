"""The sweep: idle sessions end, and sessions without a reward expire."""

from __future__ import annotations

import msgspec
from sqlalchemy import Connection

from proxy.clock import Clock
from proxy.contract.states import EndReason
from proxy.database.unit_of_work import Database
from proxy.lifecycle.events import append_event
from proxy.lifecycle.lifecycle import lock_sessions, settle
from proxy.lifecycle.outcomes import Ending
from proxy.lifecycle.signals import Signals
from proxy.runs.service import RunDirectory, RunView
from proxy.sessions.sweep_repository import SweepRepository

# A sweep commits after each batch, so that calls wait for at most one batch; the next sweep does the rest.
_SWEEP_BATCH = 500
_SWEEP_BATCHES = 20


class Swept(msgspec.Struct, frozen=True, kw_only=True):
    """The numbers of sessions that a sweep ended as idle and that expired without a reward."""

    ended: int
    expired: int


class Sweeper:
    """Ends idle sessions and expires unrewarded ones, in bounded transactions."""

    def __init__(self, database: Database, runs: RunDirectory, signals: Signals, clock: Clock) -> None:
        self._database = database
        self._runs = runs
        self._signals = signals
        self._clock = clock

    async def sweep(self) -> Swept:
        """End idle sessions and expire unrewarded ones, in bounded transactions."""
        ended = expired = 0
        for run in await self._runs_to_sweep():
            for _ in range(_SWEEP_BATCHES):
                swept = await self._sweep_batch(run)
                ended += swept.ended
                expired += swept.expired
                if max(swept.ended, swept.expired) < _SWEEP_BATCH:
                    break
        if ended or expired:
            self._signals.trajectories.notify()
        if expired:
            self._signals.events.notify()
        return Swept(ended=ended, expired=expired)

    async def _runs_to_sweep(self) -> list[RunView]:
        """Return the runs that may have sessions to sweep. One query finds them: a transaction for every run, in each
        sweep, would take time from calls in a store with hundreds of runs."""
        runs = await self._runs.list_()
        if not runs:
            return []
        now = self._clock()
        idle_seconds = min(run.settings.session_idle_seconds for run in runs)
        ended_before = now - min(run.settings.reward_timeout_seconds for run in runs)
        found = await self._database.read(
            lambda connection: SweepRepository(connection).runs_to_sweep(
                idle_seconds=idle_seconds, ended_before=ended_before, now=now
            )
        )
        return [run for run in runs if run.id in found]

    async def _sweep_batch(self, run: RunView) -> Swept:
        now = self._clock()
        settings = run.settings

        def due(connection: Connection) -> tuple[list[str], list[str]]:
            repository = SweepRepository(connection)
            idle_seconds, before = settings.session_idle_seconds, now - settings.reward_timeout_seconds
            idle = repository.idle(run_id=run.id, default_seconds=idle_seconds, now=now, limit=_SWEEP_BATCH)
            return idle, repository.unrewarded(run_id=run.id, ended_before=before, limit=_SWEEP_BATCH)

        idle, overdue = map(set, await self._database.read(due))
        if not idle and not overdue:
            return Swept(ended=0, expired=0)

        def sweep(connection: Connection) -> tuple[list[str], Swept]:
            lock_sessions(connection, [*idle, *overdue])
            # A call or another proxy may have changed sessions before they were locked.
            still_idle, still_overdue = due(connection)
            ending = [session_id for session_id in still_idle if session_id in idle]
            settled = settle(connection, (), now=now, endings=dict.fromkeys(ending, Ending(EndReason.IDLE)))
            expired = SweepRepository(connection).expire([one for one in still_overdue if one in overdue])
            if expired:
                append_event(connection, run_id=run.id, kind="session.expired", data={"count": expired}, now=now)
            return ending, Swept(ended=len(settled.ended), expired=expired)

        ended, swept = await self._database.commit(sweep)
        self._signals.endings.notify(ended)
        return swept
