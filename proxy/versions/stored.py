"""Versions in an object store, fetched into the cache from which engines read."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path, PurePosixPath

import msgspec

from proxy.contract.fetching import ObjectDamaged, fetch_directory
from proxy.contract.object_store import ObjectMissing, ObjectStore, key_of
from proxy.contract.policy import STATE_DIRECTORY, WeightsReference
from proxy.errors import WeightsMissing, WeightsRejected

# Tokenizers and indices beside the weights; the bound keeps a wrong object from filling the disk.
_COMPANION_BYTES = 256 << 20


class StoredVersions:
    """The versions of an object store. `cache` is the directory whose size `LocalWeights` bounds."""

    def __init__(self, store: ObjectStore, cache: Path) -> None:
        self._store = store
        self._cache = cache

    def path_of(self, weights: WeightsReference) -> Path:
        """Return the directory into which `fetch` puts a version."""
        digest = hashlib.sha256(msgspec.msgpack.encode((weights.uri, sorted(weights.files.items())))).hexdigest()
        return self._cache / f"stored-{digest}"

    def fetch(self, weights: WeightsReference) -> Path:
        """Return a directory with a version's files, without the trainer's state, after fetching what is missing.

        Raises WeightsRejected, WeightsMissing, OSError.
        """
        target = self.path_of(weights)
        if not target.is_dir():
            files = {name: sha256 for name, sha256 in weights.files.items() if not _is_state(name)}
            try:
                key = key_of(weights)
                fetch_directory(self._store, key, files, weights.bytes + _COMPANION_BYTES, target)
            except ObjectMissing as error:
                raise WeightsMissing(f"{error}: {key}") from error
            except (ObjectDamaged, ValueError) as error:
                raise WeightsRejected(str(error)) from error
        os.utime(target)
        return target

    def discard(self, weights: WeightsReference) -> bool:
        """Remove a version's fetched files. Return whether there were any."""
        target = self.path_of(weights)
        if not target.is_dir():
            return False
        shutil.rmtree(target, ignore_errors=True)
        return True

    def remove_run(self, run_id: str) -> None:
        """Remove all objects of a run. Raises OSError."""
        self._store.remove(f"{run_id}/")


def _is_state(name: str) -> bool:
    return PurePosixPath(name).parts[0] == STATE_DIRECTORY
