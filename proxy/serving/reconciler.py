"""Brings the engine to the head version of the run, and says what it serves.

One loop waits for `signals.versions` (a commit) or for the health interval, whichever is first; then it asks the
engine what it holds, and swaps if that is not the head. So a restarted engine, a commit that another process made and
a swap that failed are all the same case: what is loaded is not what should be.

No version is given to an engine before `inspector` has checked it. A version that fails, or that engines refuse or
die of, is rejected: the head is then the newest good version, and the next round loads that.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Protocol

import msgspec

from proxy.clock import Clock
from proxy.contract.identifiers import RunId
from proxy.contract.policy import WeightsFormat, WeightsReference, parse_weight_label, weight_label
from proxy.database.unit_of_work import Database, retried
from proxy.database.weights import weights_of
from proxy.engines.protocol import Engine, EngineInfo, PauseMode
from proxy.errors import (
    EngineFailed,
    EngineTimeout,
    EngineUnavailable,
    StorageUnavailable,
    StoreUnavailable,
    WeightsMissing,
    WeightsRejected,
)
from proxy.lifecycle.events import append_event
from proxy.lifecycle.signals import Signals
from proxy.log import logger
from proxy.runs.service import RunView
from proxy.versions.inspector import WeightsInspector
from proxy.versions.rejections import Rejections
from proxy.versions.repository import VersionRepository

_INFO_SECONDS = 10.0
_RESUME_SECONDS = 5.0
_RESUME_ATTEMPTS = 5
_MISSES_TO_BE_LOST = 3
_LONGEST_BACKOFF_SECONDS = 60.0
_ATTEMPTS_TO_REJECT = 5
"""Loads that an engine refuses, or for which files are missing, before the version is given up. With growing pauses
these take half a minute and more: a file system of a network may show new files late."""
_SUSPECT_SECONDS = 60.0
"""An engine that stops so soon after a load counts as killed by it: SGLang dies of some weights only at its first
request."""
_CHECK_PATIENCE_SECONDS = 0.5
"""How long one round waits for the check of a version's files. A large version takes longer, and the engine's health
is looked at meanwhile."""

_NO_ADAPTERS = (
    "the version is a LoRA adapter, and this engine loads whole weights only: set trainer.adapter.publish = merged"
    " and start the trainer again, and its next version is served"
)

_ENGINE_ERRORS = (EngineFailed, EngineUnavailable, EngineTimeout, TimeoutError)

_LOG = logger(__name__)


class SwapObserver(Protocol):
    """Observer of swaps, for metrics. It must neither raise nor wait."""

    def swap_finished(self, seconds: float) -> None: ...

    def swap_failed(self) -> None: ...


class _Target(msgspec.Struct, frozen=True):
    """The version that the engine should hold, and the one that it serves according to the store. `weights` is None
    for the base model. `deaths`: engines that died of the version."""

    version: int
    base_model: str
    weights: WeightsReference | None
    recorded: int
    deaths: int

    @property
    def path(self) -> str:
        return self.base_model if self.weights is None else self.weights.uri

    @property
    def is_adapter(self) -> bool:
        return self.weights is not None and self.weights.format is WeightsFormat.ADAPTER


class _Given(msgspec.Struct, frozen=True):
    """A version that the engine was given, how many engines had died of it by then, and when (loop time)."""

    version: int
    deaths: int
    at: float

    def is_suspect(self) -> bool:
        """Whether an engine that stops now counts as killed by the version."""
        return asyncio.get_running_loop().time() - self.at < _SUSPECT_SECONDS


class SwapController:
    """Start `run_forever` as a task; cancel it to end. The engine is never left paused: generation is resumed also
    when a load fails and when the task is cancelled, and at the first contact, as an earlier proxy may have died in
    the middle of a swap."""

    def __init__(
        self,
        *,
        database: Database,
        engine: Engine,
        signals: Signals,
        clock: Clock,
        run: RunView,
        inspector: WeightsInspector,
        health_interval_seconds: float,
        observer: SwapObserver | None = None,
    ) -> None:
        self._database = database
        self._engine = engine
        self._signals = signals
        self._clock = clock
        self._run_id = run.id
        self._inspector = inspector
        self._rejections = Rejections(database=database, signals=signals, clock=clock, run_id=run.id)
        self._interval = health_interval_seconds
        self._observer = observer
        self._version: int | None = None
        self._problem: str | None = None
        self._formats: tuple[WeightsFormat, ...] | None = None
        self._announced: bool | None = None
        self._misses = 0
        self._may_be_paused = True
        self._resuming: asyncio.Task[bool] | None = None
        self._swap_seconds: float | None = None
        self._failed: tuple[int, int] = (-1, 0)
        """The version that would not load, and how often in a row."""
        self._given: _Given | None = None
        """What the engine was given last, until it has survived that."""
        self._checking: tuple[WeightsReference, asyncio.Task[None]] | None = None
        self._retry_at = 0.0

    @property
    def engine_ready(self) -> bool:
        """Whether the engine answers and holds a version of the run."""
        return self._version is not None

    @property
    def engine_name(self) -> str:
        """The name by which operators know the engine."""
        return self._engine.name

    @property
    def engine_problem(self) -> str | None:
        """Why the engine takes no calls; None while it does, and before it was ever asked."""
        return self._problem if self._version is None else None

    def serving(self, run_id: RunId) -> int | None:
        """The version of the run that the engine holds now; None while it holds none or is down."""
        return self._version if run_id == self._run_id else None

    def formats(self, run_id: RunId) -> tuple[WeightsFormat, ...] | None:
        """Return the formats that the run's engine loads; None while the engine has not said so."""
        return self._formats if run_id == self._run_id else None

    def recheck_engine(self) -> None:
        """Take the engine as down after a failed call. The next round, which begins at once, asks it again."""
        self._version = None
        self._signals.versions.notify()

    async def run_forever(self) -> None:
        """Reconcile until cancelled. Failures are logged and tried again."""
        while True:
            seen = self._signals.versions.count
            try:
                await self.reconcile()
            except StoreUnavailable as error:
                _LOG.warning("swap waits for the store", error=error.message)
            except Exception:  # noqa: BLE001  (recorded, and the next round may do better)
                _LOG.exception("swap round failed")
            await self._signals.versions.wait(self._interval, since=seen)

    async def reconcile(self) -> None:
        """Ask the engine what it holds, load the head if it is another version, and record what is served. Raises
        StoreUnavailable."""
        info = await self._look()
        if info is None:
            return
        if self._may_be_paused and not await self._resume():
            await self._lost("generation is paused and cannot be resumed")
            return
        held = self._version = self._held(info)
        target = await self._target()
        if held is not None and held > target.version:
            held = self._version = None  # the store has been set back: these weights are not in it
        await self._survived(target, held)
        if held != target.version and self._is_due(target.version) and await self._is_good(target):
            held = await self._swap(target, info)
        if held is None:
            await self._lost("the engine holds no version of this run")
            return
        await self._record(held, target.recorded)

    async def _look(self) -> EngineInfo | None:
        """Ask the engine what it holds; None without an answer. An engine that refuses connections is lost at once, a
        slow one after several rounds."""
        try:
            async with asyncio.timeout(_INFO_SECONDS):
                info = await self._engine.info()
        except _ENGINE_ERRORS as error:
            self._misses += 1
            if isinstance(error, EngineUnavailable) or self._misses >= _MISSES_TO_BE_LOST:
                self._formats = None
                await self._died()
                await self._lost(str(error) or "the engine does not answer")
            return None
        self._misses = 0
        self._formats = tuple(WeightsFormat) if info.adapters else (WeightsFormat.HUGGINGFACE,)
        return info

    def _held(self, info: EngineInfo) -> int | None:
        label = parse_weight_label(info.weight_label)
        return label[1] if label is not None and label[0] == self._run_id else None

    async def _target(self) -> _Target:
        async with self._database.read() as connection:
            repository = VersionRepository(connection)
            run = await repository.run(self._run_id)
            head = await repository.version(self._run_id, run.head_version)
        return _Target(
            run.head_version, run.base_model, weights_of(head), run.serving_version, int(head.engine_deaths)
        )

    def _is_due(self, version: int) -> bool:
        return self._failed[0] != version or asyncio.get_running_loop().time() >= self._retry_at

    async def _is_good(self, target: _Target) -> bool:
        """Whether the target's files have passed their check. It goes on in the background if it takes long, and this
        loop is woken when it ends; a version that fails is rejected."""
        if target.weights is None:
            return True
        if self._checking is None or self._checking[0] != target.weights:
            task = asyncio.create_task(self._inspector.check(target.weights, target.base_model))
            task.add_done_callback(lambda _: self._signals.versions.notify())
            self._checking = (target.weights, task)
        task = self._checking[1]
        await asyncio.wait({task}, timeout=_CHECK_PATIENCE_SECONDS)
        if not task.done():
            return False
        self._checking = None
        try:
            task.result()
        except WeightsMissing as error:
            await self._load_failed(target.version, error.message, is_its_fault=error.is_storage_there)
            return False
        except StorageUnavailable as error:
            await self._load_failed(target.version, error.message, is_its_fault=False)
            return False
        except WeightsRejected as error:
            await self._reject(target.version, error.message)
            return False
        return True

    async def _swap(self, target: _Target, info: EngineInfo) -> int | None:
        """Load the target and return the version that the engine holds afterwards, whether that worked or not."""
        label = weight_label(self._run_id, target.version)
        self._swap_seconds = None
        try:
            if target.version == 0 and _is_fresh(info, target.path):
                await self._engine.label_weights(label)
            elif target.is_adapter and not info.adapters:
                raise EngineFailed(_NO_ADAPTERS)
            else:
                self._swap_seconds = await self._load(target, label)
        except _ENGINE_ERRORS as error:
            if isinstance(error, EngineUnavailable):
                self._version = None
            reason = str(error) or type(error).__name__
            await self._load_failed(target.version, reason, is_its_fault=isinstance(error, EngineFailed))
            after = await self._look()
            self._version = None if after is None else self._held(after)
            return self._version
        self._failed = (-1, 0)
        if self._may_be_paused:
            self._version = None  # loaded, but nothing is generated until a later round can resume
            return None
        self._version = target.version
        if self._observer is not None and self._swap_seconds is not None:
            self._observer.swap_finished(self._swap_seconds)
        return target.version

    async def _load(self, target: _Target, label: str) -> float:
        """Pause, load and resume; return for how many seconds generation stood still."""
        loop = asyncio.get_running_loop()
        begun = loop.time()
        self._may_be_paused = True
        try:
            await self._engine.pause(PauseMode.IN_PLACE)
            self._given = _Given(target.version, target.deaths, loop.time())
            await self._engine.load_weights(target.path, label)
        finally:
            if self._given is not None:
                self._given = _Given(target.version, target.deaths, loop.time())
            await self._resume()
        return loop.time() - begun

    async def _resume(self) -> bool:
        """Resume generation and return whether that worked. The attempts go on even if the caller is cancelled."""
        task = self._resuming = asyncio.create_task(self._try_to_resume())
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            await asyncio.wait({task})
            raise

    async def _try_to_resume(self) -> bool:
        for attempt in range(_RESUME_ATTEMPTS):
            try:
                async with asyncio.timeout(_RESUME_SECONDS):
                    await self._engine.resume()
            except _ENGINE_ERRORS as error:
                _LOG.warning("generation not resumed", attempt=attempt + 1, error=str(error))
                await asyncio.sleep(self._interval * 0.1 * 2**attempt)
            else:
                self._may_be_paused = False
                return True
        return False

    @retried
    async def _record(self, version: int, recorded: int) -> None:
        """Record the version that is served, unless the store has it already."""
        now = self._clock()
        if version != recorded:
            async with self._database.write() as connection:
                await VersionRepository(connection).mark_served(
                    self._run_id, version, swap_seconds=self._swap_seconds, now=now
                )
                data = {"version": version, "previous": recorded, "swap_seconds": self._swap_seconds}
                await append_event(connection, run_id=self._run_id, kind="version.served", data=data, now=now)
            self._signals.versions.notify()
            self._signals.events.notify()
        await self._announce(True, {"version": version})

    async def _died(self) -> None:
        """Count a death for the version that the engine was given shortly before it was lost, if there is one."""
        given, self._given = self._given, None
        if given is not None and given.version > 0 and given.is_suspect():
            await self._rejections.engine_died(given.version, deaths_before=given.deaths)
        else:
            self._failed = (-1, 0)  # another engine may take what this one refused

    async def _survived(self, target: _Target, held: int | None) -> None:
        """Forget deaths of earlier engines once this one has lived with the version for long enough."""
        if self._given is None or self._given.is_suspect():
            return
        self._given = None
        if held == target.version and target.deaths:
            await self._rejections.engine_survived(target.version)

    async def _reject(self, version: int, reason: str) -> None:
        self._failed = (-1, 0)
        if self._observer is not None:
            self._observer.swap_failed()
        await self._rejections.reject(version, reason)

    async def _load_failed(self, version: int, reason: str, *, is_its_fault: bool) -> None:
        """Wait before the next attempt; reject a version that failed often enough through a fault of its own."""
        count = self._failed[1] + 1 if self._failed[0] == version else 1
        self._failed = (version, count)
        backoff = min(self._interval * 2**count, _LONGEST_BACKOFF_SECONDS)
        self._retry_at = asyncio.get_running_loop().time() + backoff
        _LOG.error("version not loaded", version=version, attempt=count, retry_seconds=backoff, error=reason)
        if self._observer is not None:
            self._observer.swap_failed()
        await self._event("version.load_failed", {"version": version, "attempt": count, "error": reason})
        if is_its_fault and version > 0 and count >= _ATTEMPTS_TO_REJECT:
            await self._reject(version, f"it could not be loaded, {count} times in a row: {reason}")

    async def _lost(self, reason: str) -> None:
        self._version = None
        self._problem = reason
        await self._announce(False, {"reason": reason})

    async def _announce(self, ready: bool, data: dict[str, object]) -> None:
        """Log an event if the engine's readiness changed."""
        before, self._announced = self._announced, ready
        if ready == before:
            return
        if ready or before is None:
            _LOG.info("engine ready" if ready else "engine not ready yet", engine=self._engine.name, **data)
        else:
            _LOG.warning("engine lost", engine=self._engine.name, **data)
        if before is None and not ready:
            return  # it is still starting
        await self._event("engine.ready" if ready else "engine.lost", data)

    @retried
    async def _event(self, kind: str, data: dict[str, object]) -> None:
        async with self._database.write() as connection:
            await append_event(connection, run_id=self._run_id, kind=kind, data=data, now=self._clock())
        self._signals.events.notify()


def _is_fresh(info: EngineInfo, base_model: str) -> bool:
    """Whether the engine still holds the base model that it started with, under a label that base-rl did not give."""
    if parse_weight_label(info.weight_label) is not None:
        return False
    return info.model_path == base_model or Path(info.model_path).resolve() == Path(base_model).resolve()
