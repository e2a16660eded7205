"""Serve the head of an adapter run: each version is an adapter that the engine holds beside those of other runs.

A version is loaded under its own name, without a pause, and proved (`proof`); then new calls name it. Calls under way
finish on the adapter that they began with. An adapter that new calls no longer name is unloaded when nothing uses it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from proxy.clock import Clock
from proxy.contract.identifiers import RunId
from proxy.contract.policy import WeightsFormat, parse_weight_label, weight_label
from proxy.database.unit_of_work import Database
from proxy.engines.place import EngineLoad, EnginePlace
from proxy.engines.protocol import Engine, EngineInfo
from proxy.errors import EngineFailed, StorageUnavailable, StoreUnavailable, WeightsRejected
from proxy.lifecycle.signals import Signals
from proxy.log import logger
from proxy.serving.base_models import BaseModelCheck
from proxy.serving.checks import TargetCheck
from proxy.serving.faults import VersionFaults
from proxy.serving.health import ENGINE_ERRORS, EngineHealth
from proxy.serving.proof import wrong_weights
from proxy.serving.reconciler import SwapObserver
from proxy.serving.records import ServingRecords, Target
from proxy.versions.inspector import WeightsInspector
from proxy.versions.rejections import Rejections

# How long an adapter stays loaded after new calls name the next one: another proxy learns of the next one within its
# health interval, and its calls name the old one until then.
_RETIRED_SECONDS = 15.0

# Time between two attempts to load an adapter that the engine no longer lists, although calls of it succeed.
_RELOAD_SECONDS = 30.0

_NO_NAMES = (
    "it takes no LoRA adapters by name, which runs with weights = adapter need: start SGLang with --enable-lora, or"
    " use the embedded engine"
)
_NOT_THE_BASE = (
    "it holds the whole weights of a version, and adapters need the base model: start the engine again, or give the"
    " run another one"
)

_LOG = logger(__name__)


class WrongWeights(EngineFailed):
    """The engine does not compute with the adapter that it was given."""


class _Retired(msgspec.Struct):
    """An adapter that new calls no longer name, since loop time `since`. `place` is None for one that an earlier
    process left in the engine."""

    name: str
    since: float
    place: EnginePlace | None = None


class AdapterController:
    """Keeps one engine at the head of one adapter run. Start `run_forever` as a task; cancel it to end."""

    def __init__(
        self,
        *,
        database: Database,
        engine: Engine,
        load: EngineLoad,
        signals: Signals,
        clock: Clock,
        run_id: RunId,
        inspector: WeightsInspector,
        health_interval_seconds: float,
        observer: SwapObserver,
        newest: Callable[[], int | None],
    ) -> None:
        """`newest` returns the newest version of the run that any engine serves."""
        self.place = EnginePlace(engine, load)
        self.alert: str | None = None
        """Why the newest version must not be served from this engine, although an older one may be."""
        self._engine = engine
        self._load = load
        self._run_id = run_id
        self._interval = health_interval_seconds
        self._observer = observer
        self._newest = newest
        self._versions_changed = signals.versions
        self._records = ServingRecords(database=database, signals=signals, clock=clock, run_id=run_id)
        self._health = EngineHealth(engine, self._records, run_id)
        self._base_model = BaseModelCheck()
        self._check = TargetCheck(inspector, finished=signals.versions.notify)
        self._faults = VersionFaults(
            self._records,
            Rejections(database=database, signals=signals, clock=clock, run_id=run_id),
            retry_seconds=health_interval_seconds,
            swap_failed=observer.swap_failed,
        )
        self._retired: dict[str, _Retired] = {}
        self._loaded_at = 0.0
        self._has_failed = False
        """Whether a call failed since the last load."""
        self._wrong_version: int | None = None
        """The version that the event log has as wrong in this engine already."""

    @property
    def version(self) -> int | None:
        """The version of the run that new calls get here; None while there is none or the engine is down."""
        return self._health.version

    @property
    def engine_problem(self) -> str | None:
        """The reason why the engine takes no calls of the run."""
        return self._health.problem if self._health.version is None else None

    def formats(self, run_id: RunId) -> tuple[WeightsFormat, ...] | None:
        """Return the format that the run's versions must have; None while the engine has not been reached."""
        return (WeightsFormat.ADAPTER,) if self._health.formats is not None else None

    def recheck_engine(self) -> None:
        """Ask the engine at once what it holds."""
        self._has_failed = True
        self._health.suspect()
        self._versions_changed.notify()

    async def run_forever(self) -> None:
        """Reconcile until cancelled. Failures are logged and tried again."""
        while True:
            # Read first, so that a notification during the round starts the next one at once.
            seen = self._versions_changed.count
            try:
                await self.reconcile()
            except StoreUnavailable as error:
                _LOG.warning("adapters wait for the store", error=error.message)
            except Exception:  # noqa: BLE001  (recorded, and the next round may do better)
                _LOG.exception("adapter round failed")
            await self._versions_changed.wait(self._interval, since=seen)

    async def reconcile(self) -> None:
        """Ask the engine what it holds, load the head if new calls do not name it yet, and unload what is not used.

        Raises StoreUnavailable.
        """
        info = await self._health.ask()
        if info is None:
            if self._health.is_lost:
                await self._faults.engine_died()
                await self._health.report_lost(self._health.problem or "the engine does not answer")
            return
        target = await self._records.read_target()
        if (problem := await self._problem(info, target)) is not None:
            await self._health.report_lost(problem)
            return
        await self._faults.engine_lives(target, self.version)
        is_needed = self.version != target.version or self._is_gone(info)
        if is_needed and self._faults.is_due(target.version) and await self._may_load(target):
            await self._serve(target, info)
        loaded = self.version
        if loaded is None:
            await self._health.report_lost(self.alert or "the engine holds no version of this run")
            return
        if loaded != target.recorded and loaded == self._newest():
            await self._records.record_served(loaded, previous=target.recorded, swap_seconds=None)
        await self._health.report_ready(loaded)
        await self._unload_retired(info)

    def _is_gone(self, info: EngineInfo) -> bool:
        """Return whether to load again the adapter that new calls name.

        The engine may have been started again between two rounds; or it has put the adapter aside for others, and
        takes it back by itself for the next call. Loading that one at every round would push out others each time.
        """
        if self.place.adapter is None or self.place.adapter in info.adapter_names:
            return False
        return self._has_failed or asyncio.get_running_loop().time() - self._loaded_at > _RELOAD_SECONDS

    async def _problem(self, info: EngineInfo, target: Target) -> str | None:
        if not info.named_adapters:
            return _NO_NAMES
        if parse_weight_label(info.weight_label) is not None:
            return _NOT_THE_BASE
        return await self._base_model.problem(info, target.base_model)

    async def _may_load(self, target: Target) -> bool:
        try:
            return await self._check.passed(target)
        except (WeightsRejected, StorageUnavailable) as error:
            await self._faults.check_failed(target.version, error)
            return False

    async def _serve(self, target: Target, info: EngineInfo) -> None:
        """Load and prove the target, and let new calls name it."""
        label = weight_label(self._run_id, target.version)
        try:
            if target.weights is None:
                # The engine labels what it answers without an adapter by its own name for the base model.
                place = EnginePlace(self._engine, self._load, base_labels=(info.weight_label, label))
            else:
                await self._load_adapter(target, label)
                place = EnginePlace(self._engine, self._load, adapter=label)
        except ENGINE_ERRORS as error:
            reason = str(error) or type(error).__name__
            is_refusal = isinstance(error, EngineFailed) and not isinstance(error, WrongWeights)
            if self.version == target.version:  # the engine has lost it, or computes with others now
                self._health.version = None
            await self._faults.load_failed(target.version, reason, is_version_at_fault=is_refusal)
            return
        self._faults.load_succeeded()
        self.alert, self._has_failed = None, False
        self._loaded_at = asyncio.get_running_loop().time()
        if self.place.adapter is not None and self.place.adapter != label:
            now = asyncio.get_running_loop().time()
            self._retired[self.place.adapter] = _Retired(self.place.adapter, now, self.place)
        self._retired.pop(label, None)
        self.place, self._health.version = place, target.version
        if target.weights is not None:
            self._observer.swap_finished(0.0)  # generation never stood still

    async def _load_adapter(self, target: Target, label: str) -> None:
        if not target.is_adapter:
            raise EngineFailed("the version has whole weights, and versions of this run are adapters")
        self._faults.version_given(target)
        await self._engine.load_adapter(target.path, label)
        if target.probe is None:
            return  # from a trainer that computes none
        if (reason := await wrong_weights(self._engine, target.probe, label)) is None:
            return
        self.alert = reason
        if self._wrong_version != target.version:  # once, however often the load is repeated
            self._wrong_version = target.version
            _LOG.error("engine has wrong weights", engine=self._engine.name, version=target.version, reason=reason)
            data: dict[str, object] = {"engine": self._engine.name, "version": target.version, "reason": reason}
            self._observer.weights_wrong()
            await self._records.append_event("engine.wrong_weights", data)
        # No call has named it yet, so no turn was recorded from it.
        await self._engine.unload_adapter(label)
        raise WrongWeights(reason)

    async def _unload_retired(self, info: EngineInfo) -> None:
        """Unload adapters of this run that new calls do not name and nothing uses."""
        now = asyncio.get_running_loop().time()
        for name in info.adapter_names:
            label = parse_weight_label(name)
            if label is not None and label[0] == self._run_id and name != self.place.adapter:
                self._retired.setdefault(name, _Retired(name, now))
        for name, retired in list(self._retired.items()):
            if now - retired.since < _RETIRED_SECONDS or (retired.place is not None and retired.place.calls):
                continue
            try:
                await self._engine.unload_adapter(name)
            except ENGINE_ERRORS as error:
                _LOG.warning("adapter not unloaded", adapter=name, error=str(error))  # the next round tries again
            else:
                del self._retired[name]
