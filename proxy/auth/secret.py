"""The secret of an installation: the key of all HMACs, in a file of the data directory."""

from __future__ import annotations

import os
import secrets
import tempfile
from contextlib import suppress
from pathlib import Path

from proxy.private_files import make_directory
from proxy.settings import ConfigurationError

_SECRET_BYTES = 32


def load_secret(data_dir: Path) -> bytes:
    """Read the file `secret` in the data directory; create it on first use, readable by its owner only.

    Raise ConfigurationError if the file has the wrong length.
    """
    make_directory(data_dir)
    path = data_dir / "secret"
    if not path.exists():
        descriptor, name = tempfile.mkstemp(dir=data_dir, prefix="secret.")
        temporary = Path(name)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(secrets.token_bytes(_SECRET_BYTES))
                file.flush()
                os.fsync(file.fileno())
            # Linking is atomic and fails if the file exists: of several processes that start at once, one creates the
            # file, and all read a whole one.
            with suppress(FileExistsError):
                path.hardlink_to(temporary)
        finally:
            temporary.unlink()
    return _checked(path, path.read_bytes())


def find_secret(data_dir: Path) -> bytes | None:
    """Read the file `secret` if it is there. Raise ConfigurationError if it has the wrong length."""
    path = data_dir / "secret"
    try:
        return _checked(path, path.read_bytes())
    except FileNotFoundError:
        return None


def _checked(path: Path, secret: bytes) -> bytes:
    if len(secret) != _SECRET_BYTES:
        raise ConfigurationError(
            f"{path} is damaged: it has {len(secret)} bytes instead of {_SECRET_BYTES}; restore it from a backup"
        )
    return secret
