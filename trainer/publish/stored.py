"""Versions in an object store: a copy of the trainer's own directory, which is complete before the commit.

The mark `.uncommitted` is the first object of a version and is removed after the commit, as in the directory. A
version with a mark is garbage unless the proxy's head refers to it. A kill in the middle of an upload leaves such a
version: its step is made again, under another name, so there is nothing to resume.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import structlog
import torch
from torch import Tensor

from proxy.contract.delta import DELTA_INDEX, DeltaIndex
from proxy.contract.fetching import fetch_directory
from proxy.contract.object_store import ObjectStore, key_of
from proxy.contract.policy import STATE_DIRECTORY, STATE_INDEX, UNCOMMITTED_MARK, Head, WeightsReference
from trainer.config import SharedDirectory
from trainer.errors import ConfigurationError, WeightsUnusable
from trainer.models.divided import PublishedWeights
from trainer.models.policy import Policy
from trainer.parallel.mesh import Ranks
from trainer.publish.disk import DiskPublisher
from trainer.publish.publisher import Staged, TrainerState
from trainer.publish.restoring import base_of
from trainer.publish.states import needed_state, state_of

# Outages of minutes are waited for; after that the trainer ends with the reason, and its batch is given back.
_PATIENCE_SECONDS = 900.0
# Far longer than an upload: a mark of a trainer on another machine may belong to a living one.
ABANDONED_SECONDS = 6 * 3600.0
# What a trainer fetches is its own, so the bound is that of S3's largest object.
_MOST_BYTES = 5 << 40

_log = structlog.get_logger("trainer.weights")


class Mirror:
    """The versions of an object store as copies of directories below `directory`."""

    def __init__(self, url: str, directory: Path, patience: float = _PATIENCE_SECONDS) -> None:
        self._directory = directory.resolve()
        self._stopping = threading.Event()
        try:
            self.store = ObjectStore(url, patience, self._stopping.is_set)
        except ImportError as error:
            raise ConfigurationError(f"trainer.weights.url: {error}") from error

    def upload(self, weights: WeightsReference) -> None:
        """Copy a version's directory, the mark first. Raises OSError."""
        directory, key = Path(weights.uri), key_of(weights)
        self.store.upload(directory / UNCOMMITTED_MARK, f"{key}/{UNCOMMITTED_MARK}")
        for file in sorted(path for path in directory.rglob("*") if path.is_file()):
            name = file.relative_to(directory).as_posix()
            if name != UNCOMMITTED_MARK:
                self.store.upload(file, f"{key}/{name}")

    def fetch(self, weights: WeightsReference | None) -> None:
        """Make a version's directory from the store, and those of the versions that it needs, where they are missing.

        Raises WeightsUnusable.
        """
        try:
            while weights is not None:
                weights = self._fetch_one(weights)
        except (OSError, ValueError, RecursionError) as error:
            raise WeightsUnusable(f"a version cannot be fetched from {self.store.url}: {error}") from error

    def _fetch_one(self, weights: WeightsReference) -> WeightsReference | None:
        directory = Path(weights.uri)
        if directory.is_relative_to(self._directory):
            self._copy(directory, weights.files)
        if (state := needed_state(directory)) is not None:
            self._copy(directory.parent / state, {})
        index = directory / DELTA_INDEX
        return msgspec.json.decode(index.read_bytes(), type=DeltaIndex).base if index.is_file() else None

    def _copy(self, directory: Path, sums: Mapping[str, str]) -> None:
        if directory.is_dir():
            return
        key = f"{directory.parent.name}/{directory.name}"
        names = {name.removeprefix(f"{key}/") for name in self.store.keys(f"{key}/")} - {UNCOMMITTED_MARK}
        # A version that is nowhere is reported by the checks that follow.
        if not names:
            return
        if any(".." in name.split("/") or name.startswith("/") for name in names):
            raise ValueError(f"{key} has an object outside of the version")
        directory.parent.mkdir(parents=True, exist_ok=True)
        fetch_directory(self.store, key, {name: sums.get(name) for name in names}, _MOST_BYTES, directory)

    def close(self) -> None:
        """End the repetition of requests."""
        self._stopping.set()


class StoredPublisher:
    """A WeightPublisher that copies the versions of another one to an object store. Only the first rank does."""

    def __init__(self, inner: DiskPublisher, mirror: Mirror, settings: SharedDirectory, ranks: Ranks) -> None:
        self._inner = inner
        self._mirror = mirror
        self._directory = settings.directory.resolve()
        self._ranks = ranks
        self._elsewhere: dict[str, str | None] = {}
        """Versions that only the store has and that may be removed, with the names of their bases."""

    @property
    def dtype(self) -> torch.dtype | None:
        return self._inner.dtype

    @property
    def keeps_weights(self) -> bool:
        return self._inner.keeps_weights

    def is_state_due(self, head: Head) -> bool:
        return self._inner.is_state_due(head)

    def stage(
        self,
        head: Head,
        tensors: PublishedWeights,
        state: TrainerState | None,
        *,
        with_tensors: bool = True,
    ) -> Staged:
        staged = self._inner.stage(head, tensors, state, with_tensors=with_tensors)

        def upload() -> None:
            try:
                self._mirror.upload(staged.weights)
            except OSError as error:
                self._inner.discard(staged)
                raise WeightsUnusable(f"cannot upload version {head.version + 1}: {error}") from error

        self._ranks.from_first(upload)
        return staged

    def settle(self, staged: Staged) -> None:
        """Record that the weights were committed. Raises WeightsUnusable if the store does not answer: the next
        trainer settles the head first, so no ancestor of a head ever carries the mark."""
        run = Path(staged.weights.uri).parent
        with_state = {each.name for each in run.glob("v*") if state_of(each) is not None}
        self._inner.settle(staged)
        gone = [name for name in with_state if state_of(run / name) is None]
        try:
            self._mirror.store.remove(f"{key_of(staged.weights)}/{UNCOMMITTED_MARK}")
            for name in gone:
                self._mirror.store.remove(f"{run.name}/{name}/{STATE_DIRECTORY}/")
        except OSError as error:
            raise WeightsUnusable(f"the commit cannot be noted in the object store: {error}") from error

    def discard(self, staged: Staged) -> None:
        self._inner.discard(staged)
        try:
            self._mirror.store.remove(f"{key_of(staged.weights)}/")
        except OSError as error:
            _log.warning("an uncommitted version stays in the object store until the next start", reason=str(error))

    def collect(self, head: Head) -> list[str]:
        removed = self._inner.collect(head)
        run, current = self._directory / head.run_id, None if head.weights is None else Path(head.weights.uri).name
        try:
            listed = self._mirror.store.keys(f"{head.run_id}/")
            versions: dict[str, dict[str, float]] = {}
            for key, changed in listed.items():
                name, _, file = key.removeprefix(f"{head.run_id}/").partition("/")
                versions.setdefault(name, {})[file] = changed
            for name, files in sorted(versions.items()):
                if name in removed or self._is_garbage(run / name, files, name == current):
                    self._mirror.store.remove(f"{head.run_id}/{name}/")
                    removed = sorted({*removed, name})
                elif UNCOMMITTED_MARK in files and not (run / name / UNCOMMITTED_MARK).exists():
                    if name == current or (run / name).is_dir():
                        self._mirror.store.remove(f"{head.run_id}/{name}/{UNCOMMITTED_MARK}")
                elif (run / name).is_dir() and STATE_INDEX in files and state_of(run / name) is None:
                    self._mirror.store.remove(f"{head.run_id}/{name}/{STATE_DIRECTORY}/")
            self._elsewhere = {
                name: self._base_of(f"{head.run_id}/{name}/{DELTA_INDEX}") if DELTA_INDEX in files else None
                for name, files in versions.items()
                if name not in removed and UNCOMMITTED_MARK not in files and STATE_INDEX not in files
            }
        except OSError as error:
            raise WeightsUnusable(f"the object store cannot be read: {error}") from error
        return removed

    def removable(self, head: Head) -> tuple[str, ...]:
        run = self._directory / head.run_id
        found = self._inner.removable(head)
        only_stored = {name: base for name, base in self._elsewhere.items() if not (run / name).is_dir()}
        local = (each for each in run.glob("v*") if (each / DELTA_INDEX).is_file())
        needed = {Path(base).name for each in local if (base := base_of(each)) is not None}
        needed |= {base for base in only_stored.values() if base is not None}
        if head.weights is not None:
            needed.add(Path(head.weights.uri).name)
        candidates = (*found, *(str(run / name) for name in sorted(only_stored)))
        return tuple(uri for uri in candidates if Path(uri).name not in needed)

    def remove(self, uris: Sequence[str]) -> None:
        for uri in uris:
            directory = Path(uri)
            if not directory.is_relative_to(self._directory):
                continue
            try:
                # Before the directory, by which the next attempt finds it.
                self._mirror.store.remove(f"{directory.parent.name}/{directory.name}/")
            except OSError as error:
                _log.warning("old weights not removed from the object store", version=uri, reason=str(error))
                return
            self._elsewhere.pop(directory.name, None)
            self._inner.remove([uri])

    def restore(
        self, head: Head, policy: Policy, divided: Mapping[str, Tensor | None] | None = None
    ) -> TrainerState | None:
        self._ranks.from_first(lambda: self._mirror.fetch(head.weights))
        return self._inner.restore(head, policy, divided)

    def close(self) -> None:
        self._mirror.close()
        self._inner.close()

    def _is_garbage(self, directory: Path, files: Mapping[str, float], is_current: bool) -> bool:
        """Return whether a version was left by a trainer of another machine, or of a directory that was lost."""
        marked = files.get(UNCOMMITTED_MARK)
        is_old = marked is not None and time.time() - marked > ABANDONED_SECONDS
        return is_old and not is_current and not directory.is_dir()

    def _base_of(self, key: str) -> str:
        content = self._mirror.store.read(key, 0, self._mirror.store.size(key))
        try:
            return Path(msgspec.json.decode(content, type=DeltaIndex).base.uri).name
        except msgspec.DecodeError as error:
            raise OSError(f"{key} cannot be read: {error}") from error
