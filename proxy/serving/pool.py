"""Several engines for several runs: which engine serves which run, and which takes the next call.

The pool reads the engines and the active runs every health interval and places the runs (`placement`). Each run has
one controller per engine that serves it. A call goes to an engine that holds the version which the run should serve,
or the newest while no engine has that one: an engine that is behind takes no call until it has caught up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress

from proxy.clock import Clock
from proxy.contract.identifiers import RunId
from proxy.contract.policy import WeightsFormat
from proxy.database.unit_of_work import Database
from proxy.engines.activity import EngineActivity
from proxy.engines.place import EngineLoad, EnginePlace
from proxy.engines.protocol import Engine
from proxy.engines.slots import EngineSlots
from proxy.errors import EngineUnavailable, ModelNotFound, StoreUnavailable
from proxy.lifecycle.signals import Signals
from proxy.log import logger
from proxy.overview.views import EngineView
from proxy.runs.service import RunDirectory, RunView
from proxy.serving.adapter_runs import AdapterController
from proxy.serving.controller import NO_OBSERVER, ControllerSetup, RunController, SwapObserver
from proxy.serving.leases import EngineLease
from proxy.serving.member import PooledEngine
from proxy.serving.older_versions import OlderVersions
from proxy.serving.placement import PlaceableEngine, PlaceableRun, no_engine_for, place_runs
from proxy.serving.reconciler import SwapController
from proxy.serving.registry import EngineRegistry
from proxy.serving.repository import EngineRecord, EngineReport
from proxy.serving.routing import choose_place, served_version
from proxy.serving.tracks import RunTracks, serving_the_run
from proxy.serving.views import engine_state, engine_view
from proxy.settings import ConfigurationError, EngineSettings
from proxy.versions.inspector import WeightsInspector
from proxy.versions.numbers import ranges
from proxy.versions.release import Track
from proxy.versions.repository import VersionRepository

_LOG = logger(__name__)


class EnginePool:
    """The engines of this proxy. `refresh` places the runs; `start` begins to load and watch; `aclose` ends it."""

    def __init__(
        self,
        *,
        registry: EngineRegistry,
        make_engine: Callable[[str], Engine],
        settings: EngineSettings,
        database: Database,
        runs: RunDirectory,
        signals: Signals,
        clock: Clock,
        inspector: WeightsInspector,
        activity: EngineActivity,
        declared: Collection[str] = (),
        observer: SwapObserver = NO_OBSERVER,
    ) -> None:
        """`make_engine` connects to the engine at an address. `declared` are the names of the configuration's runs,
        which operators expect to be served."""
        self._settings = settings
        self._database = database
        self._runs = runs
        self._signals = signals
        self._clock = clock
        self._inspector = inspector
        self._activity = activity
        self._declared = frozenset(declared)
        self._observer = observer
        self._registry = registry
        self._make_engine = make_engine
        # Connected to before anything is stored: a wrong address ends the start.
        self._configured = {url: make_engine(url) for url in registry.configured_urls}
        self._members: list[PooledEngine] = []
        """The engines that this proxy uses, oldest first."""
        self._removed: list[PooledEngine] = []
        """Engines that this proxy uses no more, whose calls have not ended."""
        self._is_started = False
        self._refreshing = asyncio.Lock()
        self._serving: dict[RunId, tuple[RunController, ...]] = {}
        """Controllers by run, one for every engine that the run is placed on."""
        self._turns: dict[RunId, asyncio.Lock] = {}
        """Held while an engine of the run loads weights."""
        self._unplaced: tuple[RunView, ...] = ()
        self._by_adapter: frozenset[RunId] = frozenset()
        self._names: dict[str, str] = {}
        self._tracks = RunTracks(database)

    @property
    def ready(self) -> bool:
        """Whether at least one run is served."""
        return any(self.serving(run_id) is not None for run_id in self._serving)

    @property
    def problem(self) -> str | None:
        """The reason why no run is served, without addresses of engines; None while one is."""
        if self.ready:
            return None
        return next(filter(None, (member.problem for member in self._members)), "no engine is there for a run")

    def problems(self) -> list[str]:
        """Return a line for every engine that takes no calls of a run placed on it, and for every run of the
        configuration without an engine."""
        lines = [
            f"the engine {member.engine.name} accepts no calls: {problem}"
            for member in self._members
            if (problem := member.problem) is not None
        ]
        for member in self._members:
            lines += [
                f"the engine {member.engine.name} does not serve the newest version: {alert}"
                for alert in member.alerts
            ]
        # Other runs may be remains of earlier configurations: a call of one gets the same text with its 503.
        return lines + [self.unserved_reason(run) for run in self._unplaced if run.name in self._declared]

    def views(self) -> tuple[EngineView, ...]:
        """Return every engine, those that only other machines reach included, with what it serves."""
        others = self._registry.others
        views = [
            (member.record, (self._report(member), *others.get(member.record.id, ()))) for member in self._members
        ] + [(record, others.get(record.id, ())) for record in self._registry.elsewhere]
        return tuple(
            engine_view(record, reports, self._names, capacity=self._settings.max_concurrency)
            for record, reports in sorted(views, key=lambda each: (each[0].created_at, each[0].id))
        )

    def _report(self, member: PooledEngine) -> EngineReport:
        ago = member.seen_before()
        return EngineReport(
            engine_id=member.record.id,
            proxy=self._registry.identity.name,
            declares=self._registry.declares(member.record.id),
            state=engine_state(member, self.serving),
            problem=member.problem or next(iter(member.alerts), None),
            runs={run_id: each.version for run_id, each in member.controllers.items()},
            adapters=member.adapters,
            calls=member.load.calls,
            outstanding_tokens=member.load.outstanding_tokens,
            seen_at=None if ago is None else self._clock() - ago,
        )

    def is_placed(self, run_id: str) -> bool:
        """Return whether an engine is there to serve the run, ready or not."""
        return run_id in self._serving

    def count(self, run_id: RunId) -> int:
        """Return the number of engines that serve the run now, whichever version they have."""
        return sum(each.version is not None for each in serving_the_run(self._serving.get(run_id, ())))

    def serving(self, run_id: RunId) -> int | None:
        """Return the version for new calls of the run: the one that engines should serve, once one of them does, and
        until then the newest that one of them serves. None while none serves any."""
        controllers = serving_the_run(self._serving.get(run_id, ()))
        if len(controllers) == 1:
            return controllers[0].version
        held = [each.version for each in controllers if each.version is not None]
        return served_version(held, [each.wanted for each in controllers if each.wanted is not None])

    def find_place(self, run_id: RunId, session_id: str | None = None) -> EnginePlace | None:
        """Return the engine for the session's next call; None while no engine serves the run."""
        controllers = serving_the_run(self._serving.get(run_id, ()))
        if len(controllers) == 1:  # the usual case: nothing to choose
            return controllers[0].place if controllers[0].version is not None else None
        return choose_place(session_id, self._ready_places(run_id))

    def track(self, run_id: RunId, session_id: str, key_id: str) -> Track | None:
        """Return the track of a session that another version than the serving one answers; None for all others."""
        found = self._tracks.find(run_id, session_id, key_id)
        return None if found is None or found.version == self.serving(run_id) else found

    def shadow(self, run_id: RunId) -> int | None:
        """Return the candidate that answers a share of the run's prompts unseen; None without one."""
        return self._tracks.shadow(run_id)

    def another_place(self, run_id: RunId, lost: EnginePlace) -> EnginePlace | None:
        """Return another engine that serves the run; None if there is none."""
        return choose_place(None, [place for place in self._ready_places(run_id) if place is not lost])

    async def require_version(self, run: RunView, version: int) -> None:
        """Raise ModelNotFound, naming the versions that can be asked for, unless `older_place` may serve this one."""
        controllers = self._serving.get(run.id, ())
        held = {each.version for each in controllers if each.version is not None}
        if version in held:
            return
        if run.id in self._by_adapter:
            held |= set(
                await self._database.read(lambda connection: VersionRepository(connection).servable_versions(run.id))
            )
            if version in held:
                return
        which = f": ask for {run.name!r}" + (f", or for version {ranges(held)}" if held else "")
        reason = "" if run.id in self._by_adapter else ", because engines hold one version of whole weights each"
        raise ModelNotFound(
            f"version {version} of the run {run.name!r} cannot be served{reason}{which}", param="model"
        )

    async def older_place(self, run: RunView, version: int, session_id: str) -> EnginePlace:
        """Return the engine for a session's next call of an older version, which is loaded there if need be.

        Raise ModelNotFound, and EngineUnavailable while no engine can take it.
        """
        controllers = self._serving.get(run.id, ())
        # An engine that still serves the version as its newest one needs to load nothing.
        holding = [each for each in controllers if each.version == version]
        if holding:
            place = choose_place(session_id, [each.place for each in holding])
            if place is not None:
                return place
        able = [each for each in controllers if isinstance(each, AdapterController) and each.version is not None]
        if not able:
            raise EngineUnavailable(self.unserved_reason(run), retry_after=2.0)
        loaded = [each for each in able if each.holds_older(version)] or able
        chosen = choose_place(session_id, [each.place for each in loaded])
        return await next(each for each in loaded if each.place is chosen).older_place(run.base_model, version)

    def formats(self, run_id: RunId) -> tuple[WeightsFormat, ...] | None:
        """Return the formats that every engine of the run loads; None while none has reported them."""
        reported = [formats for each in self._serving.get(run_id, ()) if (formats := each.formats) is not None]
        return tuple(one for one in reported[0] if all(one in each for each in reported)) if reported else None

    def unserved_reason(self, run: RunView) -> str:
        """Return why no engine serves the run now, and what to do."""
        if run.id not in self._serving:
            return no_engine_for(run.name, run.base_model)
        problems = [member.problem for member in self._members if run.id in member.controllers and member.problem]
        return f"no engine serves the run {run.name!r} now" + (f": {problems[0]}" if problems else "")

    def recheck_engine(self, engine: Engine) -> None:
        """Ask the engine at once what it holds, because a call has lost its connection."""
        for member in self._members:
            if member.engine is engine:
                member.recheck()

    async def refresh(self) -> None:
        """Read the engines and the active runs, place the runs, and report. Raises StoreUnavailable."""
        # One at a time: the background task and requests that change engines both refresh, and a round waits for the
        # controllers that it stops.
        async with self._refreshing:
            await self._refresh()

    async def _refresh(self) -> None:
        await self._registry.read()
        await self._follow(self._registry.records)
        runs = [run for run in await self._runs.list_() if not run.is_archived]
        ids = {run.name: run.id for run in runs}
        self._names = {run.id: run.name for run in runs}
        self._by_adapter = frozenset(run.id for run in runs if run.settings.weights == "adapter")
        placed = place_runs(
            [
                # A name that no run has yet dedicates the engine all the same: nobody else may use it meanwhile.
                PlaceableEngine(
                    name=record.name,
                    base_model=record.base_model,
                    run=None if record.run is None else ids.get(record.run, RunId(record.run)),
                )
                for record in (member.record for member in self._members)
                if not record.is_draining
            ],
            [
                PlaceableRun(id=run.id, base_model=run.base_model, by_adapter=run.settings.weights == "adapter")
                for run in runs
            ],
        )
        for member in self._members:
            placed_here = placed.get(member.name, ())
            for run_id in set(member.controllers) - set(placed_here):
                self._withdraw(member, run_id)
            await member.assign(placed_here)
        self._serving = {
            run.id: controllers
            for run in runs
            if (controllers := tuple(m.controllers[run.id] for m in self._members if run.id in m.controllers))
        }
        await self._tracks.read(runs)
        for run_id in self._serving.keys() - self._by_adapter:
            self._tracks.set_apart(run_id, self._serving[run_id])
        self._unplaced = tuple(run for run in runs if run.id not in self._serving)
        reports = {member.record.id: self._report(member) for member in self._members}
        await self._registry.report(list(reports.values()))
        for member in self._members:
            record = member.record
            is_in_use = reports[record.id].is_in_use or self._registry.others_use(record.id)
            if record.desired == "draining" and not is_in_use:
                await self._registry.mark_drained(record)

    async def _follow(self, records: Sequence[EngineRecord]) -> None:
        """Connect to engines that are new, and let go of those that are gone."""
        by_place = {(member.record.id, member.record.url): member for member in self._members}
        members: list[PooledEngine] = []
        for record in records:
            # An engine at another address is another process, with weights of its own.
            member = by_place.pop((record.id, record.url), None) or self._connect(record)
            if member is not None:
                member.record = record
                member.load.tokens_elsewhere = self._registry.tokens_elsewhere(record.id)
                members.append(member)
        self._members = members
        for member in by_place.values():
            _LOG.info("engine removed", engine=member.engine.name, name=member.name)
            for run_id in list(member.controllers):
                self._withdraw(member, run_id)
            await member.assign(())
            await member.stop()
            self._removed.append(member)
        for member in [member for member in self._removed if not member.load.calls]:
            self._removed.remove(member)
            await member.aclose()

    def _connect(self, record: EngineRecord) -> PooledEngine | None:
        try:
            engine = self._configured.pop(record.url, None) or self._make_engine(record.url)
        except ConfigurationError as error:  # an address that an older release accepted
            _LOG.error("engine not used", name=record.name, error=str(error))
            return None
        member = self._new_member(record, engine)
        if self._is_started:
            _LOG.info("engine added", engine=engine.name, name=record.name)
            member.start()
        return member

    def start(self) -> None:
        """Begin to watch the engines and to load versions into them."""
        self._is_started = True
        for member in self._members:
            member.start()

    async def stop(self) -> None:
        """Stop watching and loading; calls under way go on."""
        self._is_started = False
        await asyncio.gather(*(member.stop() for member in self._members))

    async def aclose(self) -> None:
        """Close the connections to all engines."""
        await asyncio.gather(*(member.aclose() for member in (*self._members, *self._removed)))
        await asyncio.gather(*(engine.aclose() for engine in self._configured.values()))
        with suppress(StoreUnavailable):  # the reports of this proxy then count for some seconds more
            await self._registry.withdraw()

    def _withdraw(self, member: PooledEngine, run_id: RunId) -> None:
        """Send no further call of the run to the engine."""
        leaving = member.controllers[run_id]
        self._serving[run_id] = tuple(each for each in self._serving.get(run_id, ()) if each is not leaving)

    def _ready_places(self, run_id: RunId) -> list[EnginePlace]:
        newest = self.serving(run_id)
        controllers = serving_the_run(self._serving.get(run_id, ()))
        ready = [each for each in controllers if newest is not None and each.version == newest]
        return [each.place for each in ready if not each.is_loading] or [each.place for each in ready]

    def _new_member(self, record: EngineRecord, engine: Engine) -> PooledEngine:
        load = EngineLoad(EngineSlots(self._settings.max_concurrency, self._activity))
        older = OlderVersions(
            engine,
            load,
            database=self._database,
            clock=self._clock,
            inspector=self._inspector,
            count_runs=lambda: len(member.controllers),
        )
        member = PooledEngine(
            record,
            engine,
            load,
            older,
            lease=EngineLease(self._registry, record.id),
            new_controller=self._new_controller,
            interval_seconds=self._settings.health_interval_seconds,
            patience_seconds=self._settings.health_timeout_seconds,
        )
        return member

    def _new_controller(self, member: PooledEngine, run_id: RunId) -> RunController:
        kind = AdapterController if run_id in self._by_adapter else SwapController
        setup = ControllerSetup(
            engine=member.engine,
            engine_name=member.name,
            load=member.load,
            older=member.older,
            run_id=run_id,
            database=self._database,
            signals=self._signals,
            clock=self._clock,
            inspector=self._inspector,
            health_interval_seconds=self._settings.health_interval_seconds,
            observer=self._observer,
            newest=lambda: self.serving(run_id),
            lease=member.lease,
            turn=self._turns.setdefault(run_id, asyncio.Lock()),
        )
        return kind(setup)
