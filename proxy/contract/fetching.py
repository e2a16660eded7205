"""Fetch files of an object store into a directory, from where a killed process stopped, each checked by SHA-256."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from proxy.contract.object_store import PART_BYTES, ObjectStore

_PARALLEL = 8
_RANGES = ".ranges"


class ObjectDamaged(Exception):
    """An object's content is not what was published, also when it was fetched once more."""


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a file's lock while the block runs: processes share a cache, and one of them fetches a version."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def fetch_directory(
    store: ObjectStore, prefix: str, files: Mapping[str, str | None], most_bytes: int, target: Path
) -> None:
    """Fetch files below `prefix`, given with their SHA-256 if it is known, into a new directory, which
    appears whole.

    Ranges that an earlier process fetched are kept. Raises ObjectDamaged, ObjectMissing, ObjectStoreUnavailable,
    OSError, and ValueError for a file larger than `most_bytes`.
    """
    hidden = target.with_name(f".{target.name}")
    with locked(target.with_name(f".{target.name}.lock")):
        if target.is_dir():
            return
        hidden.mkdir(exist_ok=True)
        for name, sha256 in sorted(files.items()):
            path = hidden / name
            path.parent.mkdir(parents=True, exist_ok=True)
            size = store.size(f"{prefix}/{name}")
            if size > most_bytes:
                raise ValueError(f"{name} in the object store has {size} bytes, more than the version's weights")
            # Twice: what an earlier process fetched may have holes after a power cut.
            if not any(_fetch(store, f"{prefix}/{name}", path, size, sha256, hidden) for _ in range(2)):
                raise ObjectDamaged(f"{name} in {store.url} is not the file that was published: its SHA-256 differs")
        for left in hidden.rglob(f"*{_RANGES}"):
            left.unlink()
        hidden.rename(target)
    target.with_name(f".{target.name}.lock").unlink(missing_ok=True)


def _fetch(store: ObjectStore, key: str, path: Path, size: int, sha256: str | None, hidden: Path) -> bool:
    """Fetch an object; return whether it has the SHA-256, and remove it if not."""
    journal = path.with_name(f"{path.name}{_RANGES}")
    done = set(journal.read_text().split()) if journal.exists() and path.exists() else set()
    with path.open("r+b" if done else "wb") as stream, journal.open("ab" if done else "wb", buffering=0) as record:

        def fetch(begin: int) -> None:
            if str(begin) in done:
                return
            os.pwrite(stream.fileno(), store.read(key, begin, min(PART_BYTES, size - begin)), begin)
            record.write(f"{begin}\n".encode())
            # A cache removes hidden directories that nobody has touched for an hour.
            os.utime(hidden)

        with ThreadPoolExecutor(_PARALLEL, "fetch") as pool:
            list(pool.map(fetch, range(0, size, PART_BYTES)))
        os.fsync(stream.fileno())
    if sha256 is None:
        return True
    with path.open("rb") as content:
        if hashlib.file_digest(content, "sha256").hexdigest() == sha256:
            return True
    path.unlink()
    journal.unlink()
    return False
