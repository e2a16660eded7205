"""Check a version's files before an engine loads them, without stopping the reconciler for long."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from proxy.contract.policy import WeightsReference
from proxy.errors import StorageUnavailable, WeightsRejected
from proxy.serving.records import Target
from proxy.versions.inspector import WeightsInspector

PATIENCE_SECONDS = 0.5
"""How long one round of the reconciler waits for a check. A large version takes longer, and the reconciler watches
the engine's health meanwhile."""


class TargetCheck:
    """The check of the newest target for one engine. `finished` is called when a check ends that no round waited for.

    `reads_memory`: the engine may be able to read versions in this machine's shared memory.
    """

    def __init__(self, inspector: WeightsInspector, *, finished: Callable[[], None], reads_memory: bool) -> None:
        self._inspector = inspector
        self._finished = finished
        self._running: tuple[WeightsReference, asyncio.Task[None]] | None = None
        self._reads_memory = reads_memory
        self._not_received: WeightsReference | None = None
        """The newest version whose transfer to this engine failed, which it reads when it is on the disk."""

    def placed(self, target: Target) -> Target:
        """Return the target with the directory from which the engine reads it once it has passed. What the trainer
        only offers has none."""
        if target.weights is None:
            return target
        copy = self._inspector.in_memory(target.weights) if self._reads_memory else None
        if copy is not None:
            return msgspec.structs.replace(target, local=copy.uri, is_in_memory=True)
        return msgspec.structs.replace(target, local=self._inspector.path_of(target.weights))

    def may_receive(self, target: Target) -> bool:
        """Return whether the trainer offers a version to engines, and has not failed to send it to this one."""
        return target.offer is not None and target.weights != self._not_received

    async def passed(self, target: Target) -> bool:
        """Return whether the files of a `placed` target have passed their check; False while it is still running. Of
        an offered target they are those of the version before, which the engine gets if the transfer fails.

        Raises WeightsRejected for damaged files, WeightsMissing for missing ones, StorageUnavailable if they cannot
        be read now.
        """
        if target.weights is None:
            return True  # the engine itself knows where its base model is
        if target.before is not None:
            try:
                return await self.passed(target.before)
            except (WeightsRejected, StorageUnavailable):
                self.refused(target)  # the version before is due then, and whatever is wrong with it is handled
                self._finished()
                return False
        key = msgspec.structs.replace(target.weights, uri=target.path)
        if self._running is None or self._running[0] != key:
            check = self._inspector.check_in_memory if target.is_in_memory else self._inspector.check
            task = asyncio.create_task(check(target.weights, target.base_model))
            task.add_done_callback(lambda _: self._finished())
            self._running = (key, task)
        task = self._running[1]
        await asyncio.wait({task}, timeout=PATIENCE_SECONDS)
        if not task.done():
            return False
        self._running = None
        try:
            task.result()
        except WeightsRejected:
            if not (target.is_in_memory and target.is_saved):
                raise
            # The copy was damaged, or removed a moment ago, and the version itself is on the disk.
            self.refused(target)
            self._finished()
            return False
        return True

    def refused(self, target: Target) -> None:
        """Let the engine read the target from the disk from now on, if it was offered. If the engine has refused a
        copy in memory that still exists, let it read all versions from the disk, because it may run in a container of
        its own; other reasons show then."""
        if target.before is not None:
            self._not_received = target.weights
        if target.is_in_memory and Path(target.path).is_dir():
            self._reads_memory = False


def shares_memory(address: str) -> bool:
    """Return whether an engine at this address may see this machine's memory. A container behind a port of this
    machine does not, which is found when it refuses the first version."""
    host = urlsplit(address).hostname or ""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False
