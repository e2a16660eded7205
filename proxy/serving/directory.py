"""Engines as a resource: list them, and add, drain, resume and remove them while the proxies run.

Every change is one transaction on the engine's row. This proxy follows it at once, the others within their health
interval; a proxy that dies meanwhile finds the row as it is when it starts again.
"""

from __future__ import annotations

from sqlalchemy import Connection

from proxy.clock import Clock
from proxy.contract.identifiers import EngineId, RunId, new_engine_id
from proxy.contract.states import RunState
from proxy.database.now import database_now
from proxy.database.unit_of_work import Database
from proxy.engines.sglang import public_address
from proxy.errors import Conflict, NotFound
from proxy.lifecycle.events import append_event
from proxy.lifecycle.signals import Signals
from proxy.overview.views import EngineView
from proxy.runs.repository import RunRepository
from proxy.runs.service import RunView
from proxy.serving.identity import machine_of
from proxy.serving.placement import PlaceableEngine, PlaceableRun, place_runs
from proxy.serving.pool import EnginePool
from proxy.serving.registry import EngineRegistry, described, same_address
from proxy.serving.repository import EngineRecord, EngineRepository


class ForceNeeded(Conflict):
    """The change is refused because it would end service for a run or for calls under way. `force=True` makes it."""


class EngineDirectory:
    """The engines that the proxies of this store share. Methods raise NotFound for an unknown engine, Conflict for a
    change that its state does not allow, and StoreUnavailable."""

    def __init__(
        self, *, pool: EnginePool, registry: EngineRegistry, database: Database, signals: Signals, clock: Clock
    ) -> None:
        self._pool = pool
        self._registry = registry
        self._database = database
        self._signals = signals
        self._clock = clock

    def list_(self) -> tuple[EngineView, ...]:
        """Return all engines, oldest first, as of the last health interval."""
        return self._pool.views()

    async def add(self, name: str, url: str, *, base_model: str, kind: str, run: RunView | None) -> EngineView:
        """Add an engine that was checked (`admission`). `run` is the one run that it is dedicated to."""

        def write(connection: Connection) -> EngineId:
            repository = EngineRepository(connection)
            repository.lock()
            self._refuse_known(repository, name, url)
            record = EngineRecord(
                id=new_engine_id(),
                name=name,
                url=url,
                machine=machine_of(url),
                kind=kind,
                base_model=base_model,
                run=None if run is None else run.name,
                origin="api",
                desired="serving",
                created_at=database_now(connection, self._clock),
            )
            repository.insert(record)
            self._append(connection, "engine.added", record)
            return record.id

        return await self._view_after(await self._database.commit(write))

    async def drain(self, name: str, *, force: bool) -> EngineView:
        """Send no new calls to an engine; those under way end as they would. Unless `force`, refuse to leave a run
        without any engine."""

        def write(connection: Connection) -> EngineId:
            repository, record = self._locked(connection, name)
            if record.is_draining:
                return record.id
            if not force:
                self._refuse_last(connection, record, "drain")
            repository.change(record.id, desired="draining")
            self._append(connection, "engine.draining", record)
            return record.id

        return await self._view_after(await self._database.commit(write))

    async def resume(self, name: str) -> EngineView:
        """Use a drained engine again."""

        def write(connection: Connection) -> EngineId:
            repository, record = self._locked(connection, name)
            if record.is_draining:
                repository.change(record.id, desired="serving")
                self._append(connection, "engine.resumed", record)
            return record.id

        return await self._view_after(await self._database.commit(write))

    async def remove(self, name: str, *, force: bool) -> None:
        """Remove an engine that was added and is drained. With `force` its calls need not have ended: they end as
        they would, and no new ones are sent."""

        def write(connection: Connection) -> None:
            repository, record = self._locked(connection, name)
            self._refuse_configured(record)
            if not force and record.desired != "drained":
                if not record.is_draining:
                    self._refuse_last(connection, record, "remove")
                raise ForceNeeded(
                    f"the engine {record.name!r} is not drained: drain it with `base-rl engines drain {record.name}`"
                    " and remove it when its calls have ended, or remove it now with force"
                )
            repository.delete(record.id)
            self._append(connection, "engine.removed", record)

        await self._database.commit(write)
        await self._follow()

    def _locked(self, connection: Connection, name: str) -> tuple[EngineRepository, EngineRecord]:
        repository = EngineRepository(connection)
        repository.lock()
        record = repository.find(name)
        if record is None:
            known = ", ".join(each.name for each in repository.all_by_age()) or "none"
            raise NotFound(f"there is no engine {name!r}; there are: {known}")
        return repository, record

    def _refuse_known(self, repository: EngineRepository, name: str, url: str) -> None:
        for record in repository.all_by_age():
            if record.name == name:
                raise Conflict(
                    f"there is an engine called {name!r} already, at {public_address(record.url)}: choose another"
                    " name",
                    param="name",
                )
            if same_address(record.url, url) and record.machine == machine_of(url):
                raise Conflict(
                    f"the engine {record.name!r} has the address {public_address(url)} already: an engine is added"
                    " once",
                    param="url",
                )

    def _refuse_configured(self, record: EngineRecord) -> None:
        declared = self._registry.declares(record.id) or any(
            report.declares for report in self._registry.others.get(record.id, ())
        )
        if record.origin != "api" and declared:
            raise Conflict(
                f"the engine {record.name!r} is in the configuration of a running proxy, which would add it again:"
                " take it out there and restart. `base-rl engines drain` takes it out of use until then"
            )

    def _refuse_last(self, connection: Connection, record: EngineRecord, what: str) -> None:
        """Raise ForceNeeded if a run has an engine now and would have none without this one."""
        used = {each.id for each in self._registry.records}
        engines = [
            each
            for each in EngineRepository(connection).all_by_age()
            if not each.is_draining and (each.id in used or each.origin == "api")
        ]
        active = [run for run in RunRepository(connection).all_by_age() if run.state != RunState.ARCHIVED]
        runs = [
            PlaceableRun(id=run.id, base_model=run.base_model, by_adapter=run.config.get("weights") == "adapter")
            for run in active
        ]
        ids = {run.name: RunId(run.id) for run in active}
        before = _placed_runs(engines, runs, ids)
        lost = before - _placed_runs([each for each in engines if each.id != record.id], runs, ids)
        names = ", ".join(repr(run.name) for run in active if run.id in lost)
        if lost:
            raise ForceNeeded(
                f"without the engine {record.name!r} no engine would serve the run {names}: add another one first"
                f" with `base-rl engines add`, archive the run, or {what} it all the same with force"
            )

    def _append(self, connection: Connection, kind: str, record: EngineRecord) -> None:
        append_event(connection, run_id=None, kind=kind, data=described(record), now=self._clock())

    async def _view_after(self, engine_id: EngineId) -> EngineView:
        await self._follow()
        for view in self._pool.views():
            if view.id == engine_id:
                return view
        raise NotFound("the engine was removed meanwhile")

    async def _follow(self) -> None:
        self._signals.events.notify()
        await self._pool.refresh()


def _placed_runs(engines: list[EngineRecord], runs: list[PlaceableRun], ids: dict[str, RunId]) -> set[RunId]:
    placeable = [
        PlaceableEngine(
            name=each.name,
            base_model=each.base_model,
            run=None if each.run is None else ids.get(each.run, RunId(each.run)),
        )
        for each in engines
    ]
    return {run_id for placed in place_runs(placeable, runs).values() for run_id in placed}
