"""The keys of a local installation: made once, in a file that only its owner can read.

The proxy stores only HMACs of keys; with this file, `base-rl` on the same machine can use its API.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import msgspec

from proxy.private_files import make_directory

FILE_NAME = "keys.json"


class LocalKeys(msgspec.Struct, frozen=True, kw_only=True):
    admin_key: str
    run_key: str
    trainer_key: str


def _new_keys() -> LocalKeys:
    return LocalKeys(
        admin_key=f"rl-admin-{secrets.token_urlsafe(24)}",
        run_key=f"rl-run-{secrets.token_urlsafe(24)}",
        trainer_key=f"rl-trainer-{secrets.token_urlsafe(24)}",
    )


def load_or_make(data_dir: Path) -> LocalKeys:
    """Load the installation's keys, or make them. The file appears whole or not at all, readable by its owner."""
    found = load(data_dir)
    if found is not None:
        return found
    make_directory(data_dir)
    partial = _write(data_dir, _new_keys())
    try:
        os.link(partial, data_dir / FILE_NAME)
    except FileExistsError:
        pass
    finally:
        partial.unlink()
    keys = load(data_dir)
    assert keys is not None
    return keys


def load(data_dir: Path) -> LocalKeys | None:
    try:
        return msgspec.json.decode((data_dir / FILE_NAME).read_bytes(), type=LocalKeys)
    except FileNotFoundError:
        return None


def replace(data_dir: Path, name: str, text: str) -> None:
    """Put a rotated key into the file. `name` is a field of LocalKeys."""
    keys = load(data_dir)
    if keys is not None:
        _write(data_dir, msgspec.structs.replace(keys, **{name: text})).replace(data_dir / FILE_NAME)


def _write(data_dir: Path, keys: LocalKeys) -> Path:
    """Write keys to a file of this process's own, whole and on the disk; return its path."""
    partial = data_dir / f".{FILE_NAME}.{os.getpid()}"
    partial.unlink(missing_ok=True)  # left by a killed process with this id
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(msgspec.json.encode(keys))
        file.flush()
        os.fsync(file.fileno())
    return partial
