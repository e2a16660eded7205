"""The installation's secret: the key of all HMACs, in one file of the data directory."""

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
    """Read `secret` in the data directory, or make it on first use, readable by its owner alone.

    When several processes start at once, one makes the file and all read that one. Raises ConfigurationError for a
    file of the wrong length.
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
            with suppress(FileExistsError):
                path.hardlink_to(temporary)
        finally:
            temporary.unlink()
    secret = path.read_bytes()
    if len(secret) != _SECRET_BYTES:
        raise ConfigurationError(f"{path} is damaged: {len(secret)} bytes where {_SECRET_BYTES} belong")
    return secret
