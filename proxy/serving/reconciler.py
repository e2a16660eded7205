"""Bring the engine to the run's head version, and report which version it serves.

One loop waits for `signals.versions` (a commit) or for the health interval, whichever is first; then it asks the
engine what it holds, and swaps if that is not the head. A restarted engine, a commit by another process and a failed
swap are thus all the same case: the engine does not hold what it should.

The engine is given no version that `checks` has not passed. A version whose files are damaged, or that engines refuse
or die of, is rejected: the head is then the newest good version, and the next round loads that one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from proxy.clock import Clock
from proxy.contract.identifiers import RunId
from proxy.contract.policy import WeightsFormat
from proxy.database.unit_of_work import Database
from proxy.engines.place import EngineLoad, EnginePlace
from proxy.engines.protocol import Engine, EngineInfo
from proxy.errors import EngineFailed, EngineUnavailable, StorageUnavailable, StoreUnavailable, WeightsRejected
from proxy.lifecycle.signals import Signals
from proxy.log import logger
from proxy.serving.base_models import BaseModelCheck
from proxy.serving.checks import TargetCheck
from proxy.serving.faults import VersionFaults
from proxy.serving.health import ENGINE_ERRORS, EngineHealth
from proxy.serving.loading import WeightLoader
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


class SwapController:
    """Keeps one engine at the head of one run. Start `run_forever` as a task; cancel it to end."""

    def __init__(
        self,
        *,
        database: Database,
        engine: Engine,
        signals: Signals,
        clock: Clock,
        run_id: RunId,
        inspector: WeightsInspector,
        load: EngineLoad,
        health_interval_seconds: float,
        observer: SwapObserver = NO_OBSERVER,
        newest: Callable[[], int | None] | None = None,
    ) -> None:
        """`newest` returns the newest version of the run that any engine serves, where the run has several."""
        self.place = EnginePlace(engine, load)
        self._engine = engine
        self._versions_changed = signals.versions
        self._run_id = run_id
        self._interval = health_interval_seconds
        self._observer = observer
        self._records = ServingRecords(database=database, signals=signals, clock=clock, run_id=run_id)
        self._health = EngineHealth(engine, self._records, run_id)
        self._newest = newest or (lambda: self.version)
        self._base_model = BaseModelCheck()
        self._check = TargetCheck(inspector, finished=signals.versions.notify)
        self._faults = VersionFaults(
            self._records,
            Rejections(database=database, signals=signals, clock=clock, run_id=run_id),
            retry_seconds=health_interval_seconds,
            swap_failed=self._observer.swap_failed,
        )
        self._loader = WeightLoader(engine, run_id, self._faults, retry_seconds=health_interval_seconds)
        self._swap_seconds: float | None = None
        """Duration of the last swap; None if the engine already had the weights."""

    @property
    def engine_ready(self) -> bool:
        """Whether the engine answers and serves a version of the run."""
        return self._health.version is not None

    @property
    def version(self) -> int | None:
        """The version of the run that the engine serves now; None while it serves none or is down."""
        return self._health.version

    @property
    def engine_problem(self) -> str | None:
        """The reason why the engine takes no calls; None while it does, and before it was first asked."""
        return self._health.problem if self._health.version is None else None

    def serving(self, run_id: RunId) -> int | None:
        """Return the version of the run that the engine serves now; None while it serves none or is down."""
        return self._health.version if run_id == self._run_id else None

    def formats(self, run_id: RunId) -> tuple[WeightsFormat, ...] | None:
        """Return the formats that the run's engine loads; None while the engine has not reported them."""
        return self._health.formats if run_id == self._run_id else None

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
                _LOG.warning("swap waits for the store", error=error.message)
            except Exception:  # noqa: BLE001  (recorded, and the next round may do better)
                _LOG.exception("swap round failed")
            await self._versions_changed.wait(self._interval, since=seen)

    async def reconcile(self) -> None:
        """Ask the engine what it holds, load the head if it is another version, and record which version is served.

        Raises StoreUnavailable.
        """
        info = await self._ask()
        if info is None:
            return
        if self._loader.may_be_paused and not await self._loader.resume():
            await self._health.report_lost("generation is paused and cannot be resumed")
            return
        loaded = self._health.version = self._health.version_in(info)
        target = await self._records.read_target()
        if loaded is not None and loaded > target.version:
            # The store was reset to an earlier state and does not know this version.
            loaded = self._health.version = None
        if (problem := await self._base_model.problem(info, target.base_model)) is not None:
            await self._health.report_lost(problem)
            return
        await self._faults.engine_lives(target, loaded)
        if loaded != target.version and self._faults.is_due(target.version) and await self._may_load(target):
            loaded = await self._swap(target, info)
        if loaded is None:
            await self._health.report_lost("the engine holds no version of this run")
            return
        # An engine that could not load what another engine of the run serves must not put the record back.
        if loaded != target.recorded and loaded == self._newest():
            await self._records.record_served(loaded, previous=target.recorded, swap_seconds=self._swap_seconds)
        await self._health.report_ready(loaded)

    async def _ask(self) -> EngineInfo | None:
        """Ask the engine what it holds; None without an answer. A loss may be the fault of the version it was
        given."""
        info = await self._health.ask()
        if info is None and self._health.is_lost:
            await self._faults.engine_died()
            await self._health.report_lost(self._health.problem or "the engine does not answer")
        return info

    async def _may_load(self, target: Target) -> bool:
        """Return whether the target's files are good. While their check runs, they are not; its end wakes the
        loop."""
        try:
            return await self._check.passed(target)
        except (WeightsRejected, StorageUnavailable) as error:
            await self._faults.check_failed(target.version, error)
            return False

    async def _swap(self, target: Target, info: EngineInfo) -> int | None:
        """Load the target and return the version that the engine holds afterwards, whether that worked or not."""
        self._swap_seconds = None
        try:
            self._swap_seconds = await self._loader.load(target, info)
        except ENGINE_ERRORS as error:
            if isinstance(error, EngineUnavailable):
                self._health.version = None
            reason = str(error) or type(error).__name__
            is_refusal = isinstance(error, EngineFailed)
            await self._faults.load_failed(target.version, reason, is_version_at_fault=is_refusal)
            after = await self._ask()
            self._health.version = None if after is None else self._health.version_in(after)
            return self._health.version
        self._faults.load_succeeded()
        if self._loader.may_be_paused:
            self._health.version = None  # loaded, but nothing is generated until a later round can resume
            return None
        self._health.version = target.version
        if self._swap_seconds is not None:
            self._observer.swap_finished(self._swap_seconds)
        return target.version
