"""Bring the engine to the run's head version, and report which version it serves.

One loop waits for `signals.versions` (a commit) or for the health interval, whichever is first; then it asks the
engine what it holds, and swaps if that is not the head. A restarted engine, a commit by another process and a failed
swap are thus all the same case: the engine does not hold what it should.

The engine is given no version that `checks` has not passed, and serves none under its number before `proof` has. A
version whose files are damaged, that engines refuse or die of, or that the proof finds wrong, is rejected: the head
is then the newest good version, which is loaded at once after a failed proof, and else in the next round.
"""

from __future__ import annotations

from proxy.contract.policy import WeightsFormat
from proxy.engines.protocol import EngineInfo
from proxy.errors import EngineFailed, EngineUnavailable
from proxy.log import logger
from proxy.serving.controller import ControllerSetup, RunController
from proxy.serving.health import ENGINE_ERRORS
from proxy.serving.loading import WeightLoader
from proxy.serving.offers import OfferOver
from proxy.serving.proof import Failure, WholeWeightsProof
from proxy.serving.records import Target

_LOG = logger(__name__)


class SwapController(RunController):
    """The controller of a run of whole weights, or of adapters that its engine merges."""

    def __init__(self, setup: ControllerSetup) -> None:
        super().__init__(setup)
        self._loader = WeightLoader(self._engine, self._run_id, self._faults, retry_seconds=self._interval)
        self._turn = setup.turn
        self._swap_seconds: float | None = None
        """Duration of the last swap; None if the engine already had the weights."""
        self._proof = WholeWeightsProof(self._engine)
        self._proven: int | None = None
        """The version that the engine holds and that was compared with the trainer's figures."""
        self._wrong_version: int | None = None
        """The version that the event log has as wrong in this engine already."""

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
        is_due = (
            (loaded is None or loaded not in (target.version, target.unseen))
            and self._faults.is_due(target.version)
            and not self._must_wait()
        )
        # Another engine of the run loads now; its end wakes this loop. An engine that serves nothing does not wait.
        is_due = is_due and (loaded is None or not self._turn.locked())
        if is_due and await self._may_load(target):
            loaded = await self._swap_alone(target)
        if loaded is not None and loaded == target.version and loaded != self._proven:
            loaded, target = await self._prove(target, info)
        self._health.version = loaded
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
            # Again: another engine may have begun to load since.
            must_serve = self._health.version is not None and self._turn.locked()
            return self._health.version if must_serve else await self._swap(target, info)

    async def _swap(self, target: Target, info: EngineInfo) -> int | None:
        """Load the target and return the version that the engine holds afterwards, whether that worked or not."""
        self._swap_seconds = self._proven = None
        try:
            self._swap_seconds = await self._load_in_turn(target, info)
        except OfferOver:
            # No failure: the next round, which begins at once, finds the version on the disk if it is there.
            self._check.refused(target)
            self._versions_changed.notify()
            return self._health.version
        except ENGINE_ERRORS as error:
            if isinstance(error, EngineUnavailable):
                self._health.version = None
            reason = str(error) or type(error).__name__
            is_refusal = isinstance(error, EngineFailed)
            if target.before is not None or (is_refusal and target.is_in_memory):
                self._check.refused(target)
                is_refusal = False
            await self._faults.load_failed(target.version, reason, is_version_at_fault=is_refusal)
            after = await self._ask()
            self._health.version = None if after is None else await self._usable_version(after, target)
            return self._health.version
        self._faults.load_succeeded()
        if self._loader.may_be_paused:
            self._health.version = None  # loaded, but nothing is generated until a later round can resume
            return None
        if self._swap_seconds is not None:
            self._observer.swap_finished(self._swap_seconds)
        return target.version

    async def _load_in_turn(self, target: Target, info: EngineInfo) -> float | None:
        """Load the target as `WeightLoader.load` does, while no other engine of the run begins to load."""
        takes_turn = not self._turn.locked()
        if takes_turn:
            await self._turn.acquire()  # returns at once
        self.is_loading = True
        try:
            return await self._loader.load(target, info)
        finally:
            self.is_loading = False
            if takes_turn:
                self._turn.release()
                self._versions_changed.notify()

    async def _prove(self, target: Target, info: EngineInfo) -> tuple[int | None, Target]:
        """Compare what the engine computes with the trainer's figures, after a load by this proxy or another one.

        Return the version that the engine serves, and the target: they are those before if the proof rejects this
        version.
        """
        try:
            failure = await self._proof.failure(target, info)
        except ENGINE_ERRORS as error:  # it may have died of its first request
            _LOG.warning("version not proven", version=target.version, error=str(error))
            return None, target
        self._proven = target.version
        if failure is None:
            self.alert = None
            return target.version, target
        await self._report_wrong(target, failure)
        if not failure.is_version_at_fault or target.version == 0:
            return target.version, target
        await self._faults.proof_failed(target.version, failure.reason)
        good = await self._read_target()
        if good.version == target.version or not await self._may_load(good):
            return None, good
        # At once, and while calls go on: they would fail if the engine were taken out of service for the load.
        async with self._lease.held() as is_ours:
            again = await self._ask() if is_ours else None
            return None if again is None else await self._swap(good, again), good

    async def _report_wrong(self, target: Target, failure: Failure) -> None:
        if not failure.is_version_at_fault:  # else the rejection is the alert
            self.alert = f"{failure.reason}. Check its precision and its quantisation"
        if self._wrong_version == target.version:
            return
        self._wrong_version = target.version
        reason = failure.reason
        _LOG.error("engine has wrong weights", engine=self._engine.name, version=target.version, reason=reason)
        self._observer.weights_wrong()
        data: dict[str, object] = {"engine": self._engine.name, "version": target.version, "reason": reason}
        await self._records.append_event("engine.wrong_weights", data)
