"""Pausing and resuming the training of a run."""

from __future__ import annotations

from sqlalchemy import Connection

from proxy.clock import Clock
from proxy.contract.states import RunState
from proxy.database.unit_of_work import Database
from proxy.errors import Conflict, NotFound
from proxy.lifecycle.events import append_event
from proxy.lifecycle.signals import Signals
from proxy.runs.repository import RunRepository


class RunSwitch:
    """Pauses and resumes runs. Agents are served either way; no trainer claims from a paused run."""

    def __init__(self, database: Database, signals: Signals, clock: Clock) -> None:
        self._database = database
        self._signals = signals
        self._clock = clock

    async def pause(self, name_or_id: str, *, reason: str | None = None) -> str:
        """Pause a run and return its name; a paused run stays paused.

        The health view shows `reason` as a problem until the run is resumed. Raise NotFound, or Conflict if the run
        is archived.
        """
        return await self._set(name_or_id, RunState.PAUSED, "run.paused", {"reason": reason} if reason else {})

    async def resume(self, name_or_id: str) -> str:
        """Resume a run and return its name. Raise NotFound, or Conflict if the run is archived."""
        return await self._set(name_or_id, RunState.ACTIVE, "run.resumed", {})

    async def _set(self, name_or_id: str, state: RunState, kind: str, data: dict[str, str]) -> str:
        def write(connection: Connection) -> str:
            repository = RunRepository(connection)
            run = repository.by_name_or_id(name_or_id)
            if run is None:
                raise NotFound(f"there is no run {name_or_id!r}")
            if run.state == RunState.ARCHIVED:
                raise Conflict(f"the run {run.name!r} is archived")
            # The condition is part of the update, so that of two requests at once only one is logged.
            if repository.set_state(run.id, state, unless=RunState.ARCHIVED):
                append_event(connection, run_id=run.id, kind=kind, data=data, now=self._clock())
            return str(run.name)

        name = await self._database.commit(write)
        self._signals.events.notify()
        self._signals.trajectories.notify()
        return name
