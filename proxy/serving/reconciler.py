"""Bring the engine to the run's head version, and report which version it serves.

One loop waits for `signals.versions` (a commit) or for the health interval, whichever is first; then it asks the
engine what it holds, and swaps if that is not the head. A restarted engine, a commit by another process and a failed
swap are thus all the same case: the engine does not hold what it should.

The engine is given no version that `checks` has not passed. A version whose files are damaged, or that engines refuse
or die of, is rejected: the head is then the newest good version, and the next round loads that one.
"""

from __future__ import annotations

from proxy.contract.policy import WeightsFormat
from proxy.engines.protocol import EngineInfo
from proxy.errors import EngineFailed, EngineUnavailable
from proxy.serving.controller import ControllerSetup, RunController
from proxy.serving.health import ENGINE_ERRORS
from proxy.serving.loading import WeightLoader
from proxy.serving.records import Target


class SwapController(RunController):
    """The controller of a run of whole weights, or of adapters that its engine merges."""

    def __init__(self, setup: ControllerSetup) -> None:
        super().__init__(setup)
        self._loader = WeightLoader(self._engine, self._run_id, self._faults, retry_seconds=self._interval)
        self._swap_seconds: float | None = None
        """Duration of the last swap; None if the engine already had the weights."""

    @property
    def formats(self) -> tuple[WeightsFormat, ...] | None:
        return self._health.formats

    async def reconcile(self) -> None:
        info = await self._ask()
        if info is None:
            return
        if self._lease.is_abandoned:
            self._loader.may_be_paused = True
        if self._loader.may_be_paused and not await self._resume():
            await self._health.report_lost("generation is paused and cannot be resumed")
            return
        target = await self._read_target()
        loaded = self._health.version = await self._usable_version(info, target)
        if (problem := await self._base_model.problem(info, target.base_model)) is not None:
            await self._health.report_lost(problem)
            return
        await self._faults.engine_lives(target, loaded)
        is_due = loaded != target.version and self._faults.is_due(target.version) and not self._must_wait()
        if is_due and await self._may_load(target):
            loaded = await self._swap_alone(target)
        if loaded is None:
            await self._health.report_lost("the engine holds no version of this run")
            return
        await self._report(loaded, target, swap_seconds=self._swap_seconds)

    async def _usable_version(self, info: EngineInfo, target: Target) -> int | None:
        """Return the version of the run that the engine holds; None if it holds none that calls may get."""
        loaded = self._health.version_in(info)
        if loaded is None or loaded <= target.version or await self._records.may_serve(loaded):
            return loaded
        return None  # rejected, or the store was reset to an earlier state and does not know it

    def _must_wait(self) -> bool:
        """Return whether another proxy changes the engine now, or has calls there whose run would change."""
        return self._lease.is_taken or self._lease.is_awaited(self._run_id)

    async def _resume(self) -> bool:
        """Resume generation, unless another proxy has paused it for a load: that one resumes it."""
        async with self._lease.held() as is_ours:
            return await self._loader.resume() if is_ours else True

    async def _swap_alone(self, target: Target) -> int | None:
        """Load the target unless another proxy does. Return the version that the engine holds afterwards."""
        async with self._lease.held() as is_ours:
            if not is_ours:
                return self._health.version
            # Again: another proxy may have loaded the target since this round began.
            info = await self._ask()
            if info is None:
                return self._health.version
            self._health.version = await self._usable_version(info, target)
            if self._health.version == target.version:
                return target.version
            return await self._swap(target, info)

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
            self._health.version = None if after is None else await self._usable_version(after, target)
            return self._health.version
        self._faults.load_succeeded()
        if self._loader.may_be_paused:
            self._health.version = None  # loaded, but nothing is generated until a later round can resume
            return None
        self._health.version = target.version
        if self._swap_seconds is not None:
            self._observer.swap_finished(self._swap_seconds)
        return target.version
