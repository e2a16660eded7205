"""Files and directories that only their owner can read.

They are created with the private mode: setting it afterwards would leave a moment in which others can open the file,
and an open file stays readable. SQLite gives its `-wal` and `-shm` files the mode of the database file.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Literal

_DIRECTORY = 0o700
_FILE = 0o600
_OTHERS = 0o077


def make_directory(path: Path) -> None:
    """Make a directory and its parents, unless it exists. Raises OSError."""
    path.mkdir(parents=True, exist_ok=True, mode=_DIRECTORY)


def open_file(path: Path, mode: Literal["ab", "wb"]) -> BinaryIO:
    """Open a file for writing; a new one is private from the start. Raises OSError."""
    return open(path, mode, opener=lambda name, flags: os.open(name, flags, _FILE))


def make_file(path: Path) -> None:
    """Make an empty file, unless it exists. Errors are ignored: the code that opens the file next reports them."""
    if not path.exists():
        with suppress(OSError), open_file(path, "ab"):
            pass


def tighten(data_dir: Path, *, store: Path | None, directory: bool = True) -> list[Path]:
    """Remove other users' access to files that an earlier version left readable; return the changed paths.

    Covers the data directory itself (unless `directory` is false), its keys and logs, and the store with the files
    beside it. Weights are left as they are: in a private directory nobody else reaches them, and a directory is
    shared for their sake. Files of another user are left alone.
    """
    changed = []
    for path in _private_paths(data_dir, store, directory=directory):
        try:
            mode = stat.S_IMODE(path.stat().st_mode)
            if mode & _OTHERS:
                path.chmod(mode & ~_OTHERS)
                changed.append(path)
        except (FileNotFoundError, PermissionError):
            continue
    return changed


def _private_paths(data_dir: Path, store: Path | None, *, directory: bool) -> Iterator[Path]:
    if directory:
        yield data_dir
    yield from (data_dir / name for name in ("secret", "keys.json", "logs"))
    yield from sorted(data_dir.glob("logs/*.log"))
    if store is not None:
        yield from (store.with_name(store.name + end) for end in ("", "-wal", "-shm", "-journal", ".lock"))
