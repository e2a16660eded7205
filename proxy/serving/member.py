"""One engine of the pool: its watch, and a controller for every run placed on it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection

from proxy.contract.identifiers import RunId
from proxy.engines.place import EngineLoad
from proxy.engines.protocol import Engine
from proxy.engines.watch import EngineWatch
from proxy.log import logger
from proxy.serving.controller import RunController
from proxy.serving.leases import EngineLease
from proxy.serving.older_versions import OlderVersions
from proxy.serving.repository import EngineRecord

# Longest wait until calls of a run that left the engine end, before another run's weights are loaded: as long as an
# engine may take for an answer that is not streamed.
_VACATE_SECONDS = 600.0

_LOG = logger(__name__)


class PooledEngine:
    """An engine and the runs placed on it. `assign` changes the runs; `aclose` stops all work for the engine."""

    def __init__(
        self,
        record: EngineRecord,
        engine: Engine,
        load: EngineLoad,
        older: OlderVersions,
        *,
        lease: EngineLease,
        new_controller: Callable[[PooledEngine, RunId], RunController],
        interval_seconds: float,
        patience_seconds: float,
    ) -> None:
        self.record = record
        self.engine = engine
        self.load = load
        self.older = older
        self.lease = lease
        self.controllers: dict[RunId, RunController] = {}
        self._new_controller = new_controller
        self._tasks: dict[RunId, asyncio.Task[None]] = {}
        self._leaving: list[RunController] = []
        self._left_at = 0.0
        self._is_started = False
        watch = EngineWatch(
            engine,
            interval_seconds=interval_seconds,
            patience_seconds=patience_seconds,
            changed=self.recheck,
        )
        self._watch = watch
        self._watching: asyncio.Task[None] | None = None

    @property
    def name(self) -> str:
        """The name by which the pool knows the engine."""
        return self.record.name

    @property
    def is_answering(self) -> bool | None:
        """Whether the engine answered the last ping; None before the first one."""
        return self._watch.is_answering

    @property
    def has_answered(self) -> bool:
        """Whether the engine has answered a ping since this proxy watches it."""
        return self._watch.answered_at is not None

    def seen_before(self) -> float | None:
        """Return how many seconds ago the engine last answered a ping; None if it never did."""
        at = self._watch.answered_at
        return None if at is None else asyncio.get_running_loop().time() - at

    @property
    def problem(self) -> str | None:
        """The reason why the engine takes no calls of a run placed on it; None while it takes all."""
        for controller in self.controllers.values():
            if controller.version is None:
                return controller.engine_problem or "it is down, or has not loaded a version of the run yet"
        return None

    @property
    def adapters(self) -> tuple[str, ...]:
        """The LoRA adapters in the engine's memory when a controller last asked."""
        return next((each.adapter_names for each in self.controllers.values() if each.adapter_names), ())

    @property
    def alerts(self) -> list[str]:
        """Why the engine does not serve the newest version of a run, although it serves an older one."""
        serving = [each for each in self.controllers.values() if each.version is not None]
        return [each.alert for each in serving if each.alert is not None]

    def recheck(self) -> None:
        """Ask the engine at once what it holds."""
        for controller in self.controllers.values():
            controller.recheck_engine()

    def start(self) -> None:
        """Start the watch, and the controllers of the runs that are placed here now and later."""
        self._is_started = True
        self._watching = asyncio.create_task(self._watch.run_forever(), name=f"watch {self.name}")
        for run_id, controller in self.controllers.items():
            self._run(run_id, controller)

    async def assign(self, runs: Collection[RunId]) -> None:
        """Serve `runs` from now on. The weights of a new run are loaded once the calls of one that leaves have ended:
        their remaining tokens would be another run's."""
        loop = asyncio.get_running_loop()
        for run_id in [run_id for run_id in self.controllers if run_id not in runs]:
            # Out of the table first, so that no new call comes here while the task ends.
            self._leaving.append(self.controllers.pop(run_id))
            self._left_at = loop.time()
            await self._stop(run_id)
        busy = any(controller.place.calls for controller in self._leaving)
        if busy and loop.time() - self._left_at < _VACATE_SECONDS:
            return
        self._leaving.clear()
        for run_id in runs:
            if run_id not in self.controllers:
                controller = self.controllers[run_id] = self._new_controller(self, run_id)
                if self._is_started:
                    self._run(run_id, controller)

    async def aclose(self) -> None:
        """Stop the watch and the controllers, and close the connections to the engine."""
        await self.stop()
        await self.engine.aclose()

    async def stop(self) -> None:
        """Stop the watch and the controllers; calls under way go on."""
        self._is_started = False
        for run_id in list(self._tasks):
            await self._stop(run_id)
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait([self._watching])
            self._watching = None

    def _run(self, run_id: RunId, controller: RunController) -> None:
        self._tasks[run_id] = asyncio.create_task(controller.run_forever(), name=f"swaps {run_id} {self.name}")

    async def _stop(self, run_id: RunId) -> None:
        task = self._tasks.pop(run_id, None)
        if task is not None:
            task.cancel()
            await asyncio.wait([task])  # a load that was under way resumes generation before it ends
            if not task.cancelled() and task.exception() is not None:
                _LOG.error("background task ended with an error", task=task.get_name(), error=repr(task.exception()))
