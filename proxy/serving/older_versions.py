"""Answer calls that name an older version of an adapter run, such as `shop@12`.

An engine holds adapters beside each other, so an older version is loaded when a call asks for it, proved like the
newest one (`proof`), and unloaded when it was not asked for some minutes, or when another one needs its room.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Collection

import msgspec
from sqlalchemy import Connection

from proxy.clock import Clock
from proxy.contract.identifiers import RunId
from proxy.contract.policy import Probe, WeightsFormat, weight_label
from proxy.database.unit_of_work import Database
from proxy.engines.place import EngineLoad, EnginePlace
from proxy.engines.protocol import Engine
from proxy.errors import EngineFailed, EngineUnavailable, ModelNotFound
from proxy.lifecycle.weights import weights_of
from proxy.log import logger
from proxy.serving.health import ENGINE_ERRORS
from proxy.serving.proof import wrong_weights
from proxy.versions.inspector import WeightsInspector
from proxy.versions.repository import VersionRepository

# How long an older version stays loaded after the last call that named it.
IDLE_SECONDS = 300.0
# How often its use is written down for other proxies: far more often than they look at what is idle.
_NOTED_SECONDS = 30.0
# Room for an engine that does not report how many adapters it holds.
_DEFAULT_ROOM = 4

_LOG = logger(__name__)


class _Loaded(msgspec.Struct):
    """An older version in the engine. `used_at` and `noted_at` are times of the store's clock."""

    place: EnginePlace
    used_at: float
    noted_at: float = 0.0


class OlderVersions:
    """The older versions that calls of this process asked one engine for, those of all its runs together."""

    def __init__(
        self,
        engine: Engine,
        load: EngineLoad,
        *,
        database: Database,
        clock: Clock,
        inspector: WeightsInspector,
        count_runs: Callable[[], int],
    ) -> None:
        """`count_runs` returns how many runs are placed on the engine: each needs room for its newest version."""
        self._engine = engine
        self._load = load
        self._database = database
        self._clock = clock
        self._inspector = inspector
        self._count_runs = count_runs
        self._loaded: OrderedDict[str, _Loaded] = OrderedDict()
        """By label, the least recently used first."""
        # One load at a time, so that two calls neither load the same version nor both make room.
        self._loading = asyncio.Lock()

    def holds(self, run_id: RunId, version: int) -> bool:
        """Return whether the version was loaded here and not unloaded since."""
        return weight_label(run_id, version) in self._loaded

    def names(self) -> Collection[str]:
        """Return the names of the adapters that calls may name."""
        return self._loaded.keys()

    def forget(self) -> None:
        """Load every version again before its next call: the engine may have been started again."""
        self._loaded.clear()

    async def place(self, run_id: RunId, base_model: str, version: int) -> EnginePlace:
        """Return where calls of the version are answered, after loading it if need be.

        Raise ModelNotFound if its weights are gone, EngineUnavailable while the engine has no room or is down,
        EngineFailed if it refuses the adapter, WeightsRejected for damaged files.
        """
        label = weight_label(run_id, version)
        while True:
            loaded = self._loaded.get(label)
            if loaded is None:
                async with self._loading:
                    loaded = self._loaded.get(label) or await self._add(run_id, base_model, version)
            self._loaded.move_to_end(label)
            loaded.used_at = self._clock()
            if loaded.used_at - loaded.noted_at <= _NOTED_SECONDS:
                return loaded.place
            loaded.noted_at = loaded.used_at
            # Another call may make room while this is written, so the version is looked up again.
            await self._note(run_id, version, loaded.used_at)

    async def unload_idle(self) -> None:
        """Unload the versions that no call has named for some minutes."""
        now = self._clock()
        for label, loaded in list(self._loaded.items()):
            if now - loaded.used_at > IDLE_SECONDS and not loaded.place.calls:
                await self._unload(label)

    async def _add(self, run_id: RunId, base_model: str, version: int) -> _Loaded:
        row = await self._database.read(lambda connection: VersionRepository(connection).servable(run_id, version))
        if row is None:
            raise ModelNotFound(f"version {version} cannot be served any more", param="model")
        label = weight_label(run_id, version)
        weights = weights_of(row)
        if weights is None:  # the base model itself, which needs no room
            info = await self._engine.info()
            place = EnginePlace(self._engine, self._load, base_labels=(info.weight_label, label))
        else:
            if weights.format is not WeightsFormat.ADAPTER:
                raise ModelNotFound(f"version {version} has whole weights, which no engine holds", param="model")
            await self._inspector.check(weights, base_model)
            await self._make_room()
            await self._engine.load_adapter(self._inspector.path_of(weights), label)
            if row.probe is not None:
                await self._prove(msgspec.convert(row.probe, Probe), label)
            place = EnginePlace(self._engine, self._load, adapter=label)
        loaded = self._loaded[label] = _Loaded(place, self._clock())
        _LOG.info("older version loaded", engine=self._engine.name, adapter=label)
        return loaded

    async def _prove(self, probe: Probe, label: str) -> None:
        reason = await wrong_weights(self._engine, probe, label)
        if reason is not None:
            await self._engine.unload_adapter(label)
            raise EngineFailed(reason)

    async def _make_room(self) -> None:
        """Unload the least recently used versions that no call uses, until another one fits."""
        room = max(1, ((await self._engine.info()).max_adapters or _DEFAULT_ROOM) - self._count_runs())
        adapters = [label for label, loaded in self._loaded.items() if loaded.place.adapter is not None]
        idle = [label for label in adapters if not self._loaded[label].place.calls]
        for label in idle[: max(0, len(adapters) - room + 1)]:
            await self._unload(label)
        left = sum(loaded.place.adapter is not None for loaded in self._loaded.values())
        if left >= room:
            raise EngineUnavailable(
                f"the engine has room for {room} older versions, and calls use all of them: try again, or ask for the"
                " newest version",
                retry_after=2.0,
            )

    async def _unload(self, label: str) -> None:
        # Out of the table first, so that no call names it while the engine unloads it.
        loaded = self._loaded.pop(label)
        if loaded.place.adapter is None:
            return
        try:
            await self._engine.unload_adapter(label)
        except ENGINE_ERRORS as error:  # the controller of its run finds it in the engine and tries again
            _LOG.warning("adapter not unloaded", adapter=label, error=str(error))

    async def _note(self, run_id: RunId, version: int, now: float) -> None:
        def note(connection: Connection) -> None:
            VersionRepository(connection).note_asked(run_id, version, now=now)

        await self._database.commit(note)
