"""What the controllers of whole weights and of adapters share: one engine, kept at the head of one run, in rounds."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Protocol

import msgspec

from proxy.clock import Clock
from proxy.contract.identifiers import RunId
from proxy.contract.policy import WeightsFormat
from proxy.database.unit_of_work import Database
from proxy.engines.place import EngineLoad, EnginePlace
from proxy.engines.protocol import Engine, EngineInfo
from proxy.errors import StorageUnavailable, StoreUnavailable, WeightsRejected
from proxy.lifecycle.signals import Signals
from proxy.log import logger
from proxy.serving.base_models import BaseModelCheck
from proxy.serving.checks import TargetCheck, shares_memory
from proxy.serving.faults import VersionFaults
from proxy.serving.health import EngineHealth
from proxy.serving.leases import Lease, SoleLease
from proxy.serving.older_versions import OlderVersions
from proxy.serving.records import ServingRecords, Target
from proxy.versions.inspector import WeightsInspector
from proxy.versions.rejections import Rejections

_LOG = logger(__name__)


class SwapObserver(Protocol):
    """Observer of swaps, for metrics. Its methods must neither raise nor wait."""

    def swap_finished(self, seconds: float) -> None: ...

    def swap_failed(self) -> None: ...

    def weights_wrong(self) -> None: ...


class _NoObserver:
    def swap_finished(self, seconds: float) -> None: ...

    def swap_failed(self) -> None: ...

    def weights_wrong(self) -> None: ...


NO_OBSERVER: SwapObserver = _NoObserver()


class ControllerSetup(msgspec.Struct, frozen=True, kw_only=True):
    """What a controller works with: an engine with its load, a run, and the services of the proxy.

    `engine_name` is the name that events give the engine.

    `newest` returns the newest version of the run that any engine serves; None: the run has no other engine.
    `older` has the older versions that calls asked the engine for; None: the controller has some of its own.
    `turn` is held while an engine of the run loads whole weights, so that the run's others serve meanwhile.
    """

    engine: Engine
    engine_name: str = ""
    load: EngineLoad
    run_id: RunId
    database: Database
    signals: Signals
    clock: Clock
    inspector: WeightsInspector
    health_interval_seconds: float
    observer: SwapObserver = NO_OBSERVER
    newest: Callable[[], int | None] | None = None
    older: OlderVersions | None = None
    turn: asyncio.Lock = msgspec.field(default_factory=asyncio.Lock)
    lease: Lease = msgspec.field(default_factory=SoleLease)


class RunController(ABC):
    """Keeps one engine at the head of one run. Start `run_forever` as a task; cancel it to end."""

    def __init__(self, setup: ControllerSetup) -> None:
        run_id, signals = setup.run_id, setup.signals
        self.place = EnginePlace(setup.engine, setup.load)
        self.alert: str | None = None
        """Why the newest version must not be served from this engine, although an older one may be."""
        self.wanted: tuple[float, int] | None = None
        """Loop time of the last look at the store, and the version that it wanted engines to serve."""
        self.apart: int | None = None
        """The version that this engine is set apart for; None: it serves the run."""
        self.is_loading = False
        """Whether the engine computes nothing because it loads weights: new calls had better go to another one."""
        self._engine = setup.engine
        self._run_id = run_id
        self._lease = setup.lease
        self._versions_changed = signals.versions
        self._interval = setup.health_interval_seconds
        self._observer = setup.observer
        self._newest = setup.newest or (lambda: self.version)
        self._records = ServingRecords(database=setup.database, signals=signals, clock=setup.clock, run_id=run_id)
        self._health = EngineHealth(setup.engine, self._records, run_id, setup.engine_name or setup.engine.name)
        self._base_model = BaseModelCheck()
        self._check = TargetCheck(
            setup.inspector, finished=signals.versions.notify, reads_memory=shares_memory(setup.engine.name)
        )
        self._faults = VersionFaults(
            self._records,
            Rejections(database=setup.database, signals=signals, clock=setup.clock, run_id=run_id),
            retry_seconds=self._interval,
            swap_failed=self._observer.swap_failed,
        )

    @property
    def version(self) -> int | None:
        """The version of the run that new calls get here; None while there is none or the engine is down."""
        return self._health.version

    @property
    def engine_problem(self) -> str | None:
        """The reason why the engine takes no calls of the run; None while it does, and before it was first asked."""
        return self._health.problem if self._health.version is None else None

    @property
    def adapter_names(self) -> tuple[str, ...]:
        """The LoRA adapters in the engine's memory when it was last asked."""
        return self._health.adapter_names

    @property
    @abstractmethod
    def formats(self) -> tuple[WeightsFormat, ...] | None:
        """The formats that the engine loads for this run; None while the engine has not reported them."""

    @abstractmethod
    async def reconcile(self) -> None:
        """Ask the engine what it holds, load the head if it does not serve it, and record which version is served.

        Raises StoreUnavailable.
        """

    def is_at(self, serving: int | None) -> bool:
        """Return whether the engine has the right version: `serving`, or the one that it is set apart for."""
        return self.version == (serving if self.apart is None else self.apart)

    def set_apart(self, version: int | None) -> None:
        """Keep the engine at this version instead of the one that serves the run; None: let it serve the run."""
        if version != self.apart:
            self.apart = version
            self._versions_changed.notify()

    def recheck_engine(self) -> None:
        """Ask the engine at once what it holds, because a call has lost its connection or the engine hung or came
        back.

        Other calls continue until the answer, or its absence, says otherwise.
        """
        # Safe even if the engine has restarted with other weights: a turn takes its versions from the labels in the
        # engine's own reply, and a reply whose labels are no versions of this run is refused (`calls/capture.py`). No
        # token is recorded under a version that did not produce it.
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
                _LOG.warning("loading versions waits for the store", error=error.message)
            except Exception:  # noqa: BLE001  (recorded, and the next round may do better)
                _LOG.exception("a round of loading versions failed")
            await self._versions_changed.wait(self._interval, since=seen)

    async def _ask(self) -> EngineInfo | None:
        """Ask the engine what it holds; None without an answer. A loss may be the fault of the version it was
        given."""
        info = await self._health.ask()
        if info is None and self._health.is_lost:
            await self._faults.engine_died()
            await self._health.report_lost(self._health.problem or "the engine does not answer")
        if info is not None:
            self.place.load.slots.fit(info.max_running)
        return info

    async def _read_target(self) -> Target:
        """Return the version that the engine should serve. Raises StoreUnavailable."""
        target = self._check.placed(await self._records.read_target(self.apart))
        if not (target.is_saved or target.is_in_memory):
            # This engine cannot read it yet; after a restart of the machine perhaps nobody ever will. The version
            # before is on the disk.
            before = self._check.placed(await self._records.read_good_before(target.version))
            if self._check.may_receive(target):
                target = msgspec.structs.replace(target, before=before)
            else:
                target = msgspec.structs.replace(before, unseen=target.version)
        self.wanted = (asyncio.get_running_loop().time(), target.unseen or target.version)
        return target

    async def _may_load(self, target: Target) -> bool:
        """Return whether the target's files are good. While their check runs, they are not; its end wakes the
        loop."""
        try:
            return await self._check.passed(target)
        except (WeightsRejected, StorageUnavailable) as error:
            await self._faults.check_failed(target.version, error)
            return False

    async def _report(self, loaded: int, target: Target, *, swap_seconds: float | None) -> None:
        """Record that the engine serves `loaded`, if the store has another version, and that it is ready."""
        # An engine that could not load what another engine of the run serves must not put the record back.
        if self.apart is None and loaded != target.recorded and loaded == self._newest():
            await self._records.record_served(loaded, previous=target.recorded, swap_seconds=swap_seconds)
        await self._health.report_ready(loaded)
