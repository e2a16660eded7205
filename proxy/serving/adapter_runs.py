"""Serve the head of an adapter run: each version is an adapter that the engine holds beside those of other runs.

A version is loaded under its own name, without a pause, and proved (`proof`); then new calls name it. Calls under way
finish on the adapter that they began with. An adapter that new calls no longer name is unloaded when nothing uses it.
"""

from __future__ import annotations

import asyncio

import msgspec

from proxy.contract.policy import WeightsFormat, parse_weight_label, weight_label
from proxy.engines.place import EnginePlace
from proxy.engines.protocol import EngineInfo
from proxy.errors import EngineFailed
from proxy.log import logger
from proxy.serving.controller import ControllerSetup, RunController
from proxy.serving.health import ENGINE_ERRORS
from proxy.serving.older_versions import IDLE_SECONDS, OlderVersions
from proxy.serving.proof import is_exact_in, wrong_weights
from proxy.serving.records import Target

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


class AdapterController(RunController):
    """The controller of an adapter run."""

    def __init__(self, setup: ControllerSetup) -> None:
        super().__init__(setup)
        self._load = setup.load
        self._older = setup.older or OlderVersions(
            setup.engine,
            setup.load,
            database=setup.database,
            clock=setup.clock,
            inspector=setup.inspector,
            count_runs=lambda: 1,
        )
        self._clock = setup.clock
        self._retired: dict[str, _Retired] = {}
        self._loaded_at = 0.0
        self._has_failed = False
        """Whether a call failed since the last load."""
        self._wrong_version: int | None = None
        """The version that the event log has as wrong in this engine already."""

    async def older_place(self, base_model: str, version: int) -> EnginePlace:
        """Return where calls of an older version are answered (`OlderVersions.place`)."""
        return await self._older.place(self._run_id, base_model, version)

    def holds_older(self, version: int) -> bool:
        """Return whether the engine has an older version in memory for calls of this proxy."""
        return self._older.holds(self._run_id, version)

    @property
    def formats(self) -> tuple[WeightsFormat, ...] | None:
        return (WeightsFormat.ADAPTER,) if self._health.formats is not None else None

    def recheck_engine(self) -> None:
        self._has_failed = True
        self._older.forget()
        super().recheck_engine()

    async def reconcile(self) -> None:
        info = await self._ask()
        if info is None:
            return
        target = await self._read_target()
        if (problem := await self._problem(info, target)) is not None:
            await self._health.report_lost(problem)
            return
        await self._faults.engine_lives(target, self.version)
        is_needed = self.version != target.version or self._is_gone(info)
        is_due = is_needed and self._faults.is_due(target.version) and not self._lease.is_taken
        if is_due and await self._may_load(target):
            await self._serve_alone(target, info)
        loaded = self.version
        if loaded is None:
            await self._health.report_lost(self.alert or "the engine holds no version of this run")
            return
        await self._report(loaded, target, swap_seconds=None)
        await self._unload_retired(info, target)

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

    async def _serve_alone(self, target: Target, info: EngineInfo) -> None:
        """Serve the target, unless another proxy changes the engine now: then a later round does."""
        if target.weights is None:  # nothing is loaded
            await self._serve(target, info)
            return
        async with self._lease.held() as is_ours:
            # Again: another proxy may have loaded the adapter since this round began.
            now = await self._ask() if is_ours else None
            if now is not None:
                await self._serve(target, now)

    async def _serve(self, target: Target, info: EngineInfo) -> None:
        """Load and prove the target, and let new calls name it."""
        label = weight_label(self._run_id, target.version)
        try:
            if target.weights is None:
                # The engine labels what it answers without an adapter by its own name for the base model.
                place = EnginePlace(self._engine, self._load, base_labels=(info.weight_label, label))
            else:
                await self._load_adapter(target, label, info)
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

    async def _load_adapter(self, target: Target, label: str, info: EngineInfo) -> None:
        if not target.is_adapter:
            raise EngineFailed("the version has whole weights, and versions of this run are adapters")
        self._faults.version_given(target)
        if label not in info.adapter_names:  # else another proxy has loaded it, and it need only be proved
            await self._engine.load_adapter(target.path, label)
        if target.probe is None:
            return  # from a trainer that computes none
        is_exact = await is_exact_in(target, info)
        if (reason := await wrong_weights(self._engine, target.probe, label, is_exact=is_exact)) is None:
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

    async def _unload_retired(self, info: EngineInfo, target: Target) -> None:
        """Unload adapters of this run that new calls do not name and nothing uses."""
        now = asyncio.get_running_loop().time()
        await self._older.unload_idle()
        for name in info.adapter_names:
            label = parse_weight_label(name)
            # The target stays too: another proxy may have loaded it before this one.
            is_named = name == self.place.adapter or label == (self._run_id, target.version)
            if label is not None and label[0] == self._run_id and not is_named:
                self._retired.setdefault(name, _Retired(name, now))
        if not self._retired:
            return
        # Other proxies name older versions too, of which this one knows only from the store.
        asked = await self._records.asked_since(self._clock() - IDLE_SECONDS)
        in_use = {*self._older.names(), *(weight_label(self._run_id, version) for version in asked)}
        for name, retired in list(self._retired.items()):
            if name in in_use:
                continue
            if now - retired.since < _RETIRED_SECONDS or (retired.place is not None and retired.place.calls):
                continue
            try:
                await self._engine.unload_adapter(name)
            except ENGINE_ERRORS as error:
                _LOG.warning("adapter not unloaded", adapter=name, error=str(error))  # the next round tries again
            else:
                del self._retired[name]
