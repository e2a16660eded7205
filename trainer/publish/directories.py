"""Directories that become versions: marks of what is not committed, locks of their writers, and durable writes."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO

from proxy.contract.policy import UNCOMMITTED_MARK

_MOST_SYNCS = 8


def mark(directory: Path) -> IO[bytes]:
    """Mark a directory as uncommitted while this process lives and the file is open. Ranks share the lock."""
    lock = (directory / UNCOMMITTED_MARK).open("wb")
    fcntl.flock(lock, fcntl.LOCK_SH)
    return lock


def remove_marked(directory: Path) -> None:
    """Remove an uncommitted directory. Its mark goes last, so that it is still garbage after a kill in the middle."""
    for each in directory.glob("*"):
        if each.is_dir():
            shutil.rmtree(each, ignore_errors=True)
        elif each.name != UNCOMMITTED_MARK:
            with contextlib.suppress(OSError):
                each.unlink()
    shutil.rmtree(directory, ignore_errors=True)


def is_locked(marked: Path) -> bool:
    """Return whether a live process holds the lock of a mark."""
    try:
        with marked.open("rb") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return True
    return False


def make_durable_directory(directory: Path) -> None:
    """Create a directory with its parents, so that they exist after a power cut as well."""
    if directory.is_dir():
        return
    missing = [directory, *(parent for parent in directory.parents if not parent.exists())]
    directory.mkdir(parents=True, exist_ok=True)
    for path in missing:
        sync(path.parent)


def flush(directory: Path) -> None:
    """Force a tree's files and directories to the disk, in any order."""
    paths = [directory, *directory.rglob("*")]
    # Beside each other: a file system writes its journal once for all that ask meanwhile, and one after the other it
    # would for each. Of small versions that is most of the time.
    with ThreadPoolExecutor(min(len(paths), _MOST_SYNCS), "sync") as pool:
        for _ in pool.map(sync, paths):
            pass


def sync(path: Path) -> None:
    """Force a file's content, or a directory's entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
