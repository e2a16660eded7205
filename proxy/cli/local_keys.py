"""The keys of a local installation: made once, kept in a file that only its owner can read.

The proxy stores HMACs alone; this file is how `base-rl` on the same machine can ask it anything.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import msgspec

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
    """The installation's keys. The file appears whole or not at all, readable by its owner only."""
    found = load(data_dir)
    if found is not None:
        return found
    data_dir.mkdir(parents=True, exist_ok=True)
    partial = data_dir / f".{FILE_NAME}.{os.getpid()}"
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(msgspec.json.encode(_new_keys()))
        file.flush()
        os.fsync(file.fileno())
    try:
        os.link(partial, data_dir / FILE_NAME)
    except FileExistsError:
        pass
    finally:
        partial.unlink()
    kept = load(data_dir)
    assert kept is not None
    return kept


def load(data_dir: Path) -> LocalKeys | None:
    try:
        return msgspec.json.decode((data_dir / FILE_NAME).read_bytes(), type=LocalKeys)
    except FileNotFoundError:
        return None
