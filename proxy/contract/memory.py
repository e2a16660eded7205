"""Versions in shared memory, on their way from a trainer to engines of the same machine.

```
/dev/shm/base-rl-1000/RUN_ID/v000012-1f6b09c2/     the version's weights, configuration and tokenizer
    .uncommitted                                   locked by the trainer that writes, and by whoever reads
```
A version has the last two names of its directory on the disk. What is there is a copy for engines and never the only
thing that a version refers to for long: its trainer writes the directory on the disk after the commit.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from proxy.contract.object_store import key_of
from proxy.contract.policy import UNCOMMITTED_MARK, WeightsReference

_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - a directory of the user's own is made in it


def default_memory_directory() -> Path:
    """Return the directory that trainer and proxy of one user share without a setting."""
    # Named by user, because /dev/shm is everybody's and the first who makes a directory owns it.
    return _SHARED_MEMORY / f"base-rl-{os.getuid()}"


def place_in_memory(weights: WeightsReference, root: Path) -> Path:
    """Return the directory of a version below the memory's `root`. Raises ValueError if its uri has no such name."""
    return root / key_of(weights)


@contextmanager
def reading(directory: Path) -> Iterator[bool]:
    """Keep the trainer from removing a version in memory while the block runs. Yield False if it is gone already, or
    is being removed."""
    mark = directory / UNCOMMITTED_MARK
    try:
        stream = mark.open("rb")
    except OSError:
        yield False
        return
    with stream:
        try:
            # Without waiting, because event loops call this, and removing gigabytes takes a while.
            fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield mark.exists()  # it may have been removed between the opening and the lock


def remove_unread(directory: Path, remove: Callable[[Path], None]) -> None:
    """Call `remove` for a version in memory, unless somebody reads or writes it, and let nobody begin meanwhile."""
    try:
        stream = (directory / UNCOMMITTED_MARK).open("rb")
    except OSError:
        return
    with stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        remove(directory)
