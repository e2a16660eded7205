"""Check a version's files before an engine loads them, without stopping the reconciler for long."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from proxy.contract.policy import WeightsReference
from proxy.serving.records import Target
from proxy.versions.inspector import WeightsInspector

PATIENCE_SECONDS = 0.5
"""How long one round of the reconciler waits for a check. A large version takes longer, and the reconciler watches
the engine's health meanwhile."""


class TargetCheck:
    """The check of the newest target. `finished` is called when a check ends that no round waited for."""

    def __init__(self, inspector: WeightsInspector, *, finished: Callable[[], None]) -> None:
        self._inspector = inspector
        self._finished = finished
        self._running: tuple[WeightsReference, asyncio.Task[None]] | None = None

    def placed(self, target: Target) -> Target:
        """Return the target with the directory from which engines read it once it has passed."""
        if target.weights is None:
            return target
        return msgspec.structs.replace(target, local=self._inspector.path_of(target.weights))

    async def passed(self, target: Target) -> bool:
        """Return whether the target's files have passed their check; False while it is still running.

        Raises WeightsRejected for damaged files, WeightsMissing for missing ones, StorageUnavailable if they cannot
        be read now.
        """
        if target.weights is None:
            return True  # the engine itself knows where its base model is
        if self._running is None or self._running[0] != target.weights:
            task = asyncio.create_task(self._inspector.check(target.weights, target.base_model))
            task.add_done_callback(lambda _: self._finished())
            self._running = (target.weights, task)
        task = self._running[1]
        await asyncio.wait({task}, timeout=PATIENCE_SECONDS)
        if not task.done():
            return False
        self._running = None
        task.result()
        return True
