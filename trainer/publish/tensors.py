"""Versions in shared memory: engines of the same machine read them there; the disk gets its copy after the commit.

`MEMORY/RUN_ID/v000012-1f6b09c2/` has what an engine needs of `DIRECTORY/RUN_ID/v000012-1f6b09c2/`, which is written
from it together with the trainer state. Memory files outlive the process that wrote them, so an engine that loads a
version when its trainer dies is not disturbed. The mark `.uncommitted` stays as long as the copy, to be locked: by
this trainer until the version is settled, and by whoever reads it. A copy whose mark is locked is not removed.

Before a version is written, all copies but that of its parent are removed, so the memory has two versions at most,
and those that are being read.
"""

from __future__ import annotations

import errno
import os
import shutil
from contextlib import suppress
from functools import partial
from pathlib import Path

import msgspec

from proxy.contract.memory import place_in_memory, remove_unread
from proxy.contract.policy import Head, WeightsReference
from trainer.config import TensorsWeights
from trainer.errors import ConfigurationError, WeightsUnusable
from trainer.models.divided import PublishedWeights, bytes_of
from trainer.models.policy import Policy
from trainer.parallel.mesh import Ranks
from trainer.publish.directories import remove_marked
from trainer.publish.disk import DiskPublisher, Saved, new_name
from trainer.publish.publisher import Staged, TrainerState
from trainer.publish.shards import MEGABYTE


class TensorsPublisher(DiskPublisher):
    """A publisher through the memory of this machine, of which trainer, proxy and engines see the same directory.

    Adapters go to the disk at once: they are small, and engines that put one aside read it again much later.
    """

    def __init__(
        self, settings: TensorsWeights, base: Path, policy: Policy | None = None, ranks: Ranks | None = None
    ) -> None:
        """Raises ConfigurationError if the directory in memory cannot be used."""
        super().__init__(settings, base, policy, ranks)
        self._memory = settings.memory.resolve()
        self._copies: set[Path] = set()
        if not self.publishes_adapters:
            self._ranks.from_first(lambda: _prepare(self._memory))

    def stage(
        self,
        head: Head,
        tensors: PublishedWeights,
        state: TrainerState | None,
        *,
        with_tensors: bool = True,
    ) -> Staged:
        """Write the successor of `head` to the memory. Raises WeightsUnusable if there is no room for it."""
        if self.publishes_adapters:
            return super().stage(head, tensors, state, with_tensors=with_tensors)
        place = self._ranks.from_first(lambda: self._place(head, bytes_of(tensors)))
        try:
            copy = self._write_to(place, head, partial(self._saving, head, tensors), None)
        except WeightsUnusable as error:
            if isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.ENOSPC:
                raise self._no_room(head, None) from error
            raise
        if self._ranks.is_first:
            self._copies.add(place)
        uri = str(self._directory / head.run_id / place.name)
        weights = msgspec.structs.replace(copy.weights, uri=uri)
        return Staged(
            parent=copy.parent,
            weights=weights,
            save=lambda _: self.save_copy(place, head, weights, state, with_tensors),
        )

    def _place(self, head: Head, needed: int) -> Path:
        """Return where the successor of `head` is written, after freeing what no engine needs any more."""
        self._free(head)
        if needed > room_in(self._memory):
            raise self._no_room(head, needed)
        return self._memory / head.run_id / new_name(head)

    def _no_room(self, head: Head, needed: int | None) -> WeightsUnusable:
        size = "" if needed is None else f" of {needed / MEGABYTE:,.1f} MB"
        return WeightsUnusable(
            f"version {head.version + 1}{size} does not fit into the {room_in(self._memory) / MEGABYTE:,.1f} MB that"
            f" are free in {self._memory}: two versions must fit there. Free memory, make that file system larger"
            " (docker run --shm-size; in Kubernetes an emptyDir volume of medium Memory), or set"
            ' trainer.weights.type = "disk"'
        )

    def save_copy(
        self, place: Path, head: Head, weights: WeightsReference, state: TrainerState | None, with_tensors: bool
    ) -> Staged:
        """Write the directory of a version that is in memory at `place`. A collective; raises WeightsUnusable."""

        def copy(directory: Path) -> Saved:
            for name in weights.files:
                (directory / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(place / name, directory / name)
            # The files' checksums were computed when they were written, and the proxy has compared them since.
            return Saved(weights.format, weights.files, weights.sha256, weights.bytes)

        return self._write_to(
            Path(weights.uri),
            head,
            lambda directory: lambda: copy(directory),
            state,
            with_tensors=with_tensors,
        )

    def settle(self, staged: Staged) -> None:
        super().settle(staged)
        self._release(str(place_in_memory(staged.weights, self._memory)))

    def discard(self, staged: Staged) -> None:
        super().discard(staged)
        place = place_in_memory(staged.weights, self._memory)
        remove_marked(place)
        self._release(str(place))

    def collect(self, head: Head) -> list[str]:
        removed = super().collect(head)
        if not self.publishes_adapters:
            self._free(head)
        return removed

    def close(self) -> None:
        """Free the memory of versions that are on the disk. Those that are not stay for engines that load them."""
        super().close()
        for place in self._copies:
            if (self._directory / place.parent.name / place.name).is_dir():
                remove_unread(place, remove_marked)
                with suppress(OSError):  # other versions may be in it
                    place.parent.rmdir()

    def _free(self, head: Head) -> None:
        """Remove the copies of a run's versions, except the head's and those whose marks are locked."""
        current = None if head.weights is None else Path(head.weights.uri).name
        for place in (self._memory / head.run_id).glob("*"):
            if place.name != current:
                remove_unread(place, remove_marked)


def _prepare(memory: Path) -> None:
    """Make the directory in memory. Raises ConfigurationError."""
    try:
        memory.mkdir(mode=0o700, parents=True, exist_ok=True)
        owner = memory.stat().st_uid
    except OSError as error:
        raise ConfigurationError(
            f"trainer.weights.memory_directory: {memory} cannot be made: {error.strerror or error}. Name a directory"
            ' in a file system in memory (tmpfs), or set trainer.weights.type = "disk"'
        ) from error
    # /dev/shm is everybody's. Whoever owns the directory could exchange files between the proxy's check and the load.
    if owner != os.geteuid():
        raise ConfigurationError(
            f"trainer.weights.memory_directory: {memory} belongs to another user: remove it, or name another"
            " directory and give the proxy the same as server.weights_memory_dir"
        )


def room_in(memory: Path) -> int:
    """Return the free bytes of the file system in which a directory is."""
    found = os.statvfs(memory)
    return found.f_bavail * found.f_frsize
