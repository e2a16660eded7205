"""The state of a run: active, paused or archived."""

from __future__ import annotations

from functools import partial

from sqlalchemy import Connection

from proxy.clock import Clock
from proxy.contract.states import RunState
from proxy.database.unit_of_work import Database
from proxy.errors import Conflict, NotFound
from proxy.lifecycle.events import append_event
from proxy.lifecycle.signals import Signals
from proxy.runs.repository import RunRepository


class RunSwitch:
    """Pauses, resumes, archives and unarchives runs.

    A paused run serves agents, but no trainer claims from it. An archived run keeps its data and serves nothing.
    Every method returns the run's name, changes nothing in a run that is in the wanted state, and raises NotFound.
    """

    def __init__(self, database: Database, signals: Signals, clock: Clock) -> None:
        self._database = database
        self._signals = signals
        self._clock = clock

    async def pause(self, name_or_id: str, *, reason: str | None = None) -> str:
        """Pause a run. The health view shows `reason` as a problem until the run is resumed. Raise Conflict if it is
        archived."""
        data = {"reason": reason} if reason else {}
        return await self._set(name_or_id, RunState.PAUSED, "run.paused", data, among=(RunState.ACTIVE,))

    async def resume(self, name_or_id: str) -> str:
        """Resume a run. Raise Conflict if it is archived."""
        return await self._set(name_or_id, RunState.ACTIVE, "run.resumed", {}, among=(RunState.PAUSED,))

    async def archive(self, name_or_id: str) -> str:
        """Archive a run. A claim that a trainer has leased may still be committed, so that no work is lost."""
        among = (RunState.ACTIVE, RunState.PAUSED)
        return await self._set(name_or_id, RunState.ARCHIVED, "run.archived", {}, among=among)

    async def unarchive(self, name_or_id: str) -> str:
        """Make an archived run active. A run that is not archived keeps its state: a paused one is not resumed."""
        return await self._set(name_or_id, RunState.ACTIVE, "run.unarchived", {}, among=(RunState.ARCHIVED,))

    async def _set(
        self, name_or_id: str, state: RunState, kind: str, data: dict[str, str], *, among: tuple[RunState, ...]
    ) -> str:
        name = await self._database.commit(
            partial(_change, name_or_id=name_or_id, state=state, kind=kind, data=data, among=among, now=self._clock())
        )
        self._signals.events.notify()
        self._signals.trajectories.notify()
        return name


def _change(
    connection: Connection,
    *,
    name_or_id: str,
    state: RunState,
    kind: str,
    data: dict[str, str],
    among: tuple[RunState, ...],
    now: float,
) -> str:
    repository = RunRepository(connection)
    run = repository.by_name_or_id(name_or_id)
    if run is None:
        raise NotFound(f"there is no run {name_or_id!r}")
    if run.state == RunState.ARCHIVED and RunState.ARCHIVED not in (state, *among):
        raise Conflict(f"the run {run.name!r} is archived: use `base-rl runs unarchive {run.name}` first")
    # The condition is part of the update, so that of two requests at once only one is logged.
    if repository.set_state(run.id, state, among=among):
        append_event(connection, run_id=run.id, kind=kind, data=data, now=now)
    return str(run.name)
