"""The trainers of a run that are alive on this machine, by file locks that the kernel releases when a process dies.

`DIRECTORY/PROCESS` contains the machine's name and is locked for the life of the process. So a trainer that starts
can distinguish the claims of a dead trainer, which nobody renews, from those of a live one, and give the former back
at once. Claims of dead trainers on other machines come back when their leases expire.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import socket
from pathlib import Path
from typing import IO

from trainer.errors import ConfigurationError

# Keeps names short enough to be read in lists of claims.
_HOST_LETTERS = 32


def new_process_name() -> str:
    """Return a new, unique and readable name: machine, process id, random suffix."""
    host = "".join(letter if letter.isalnum() or letter in "-." else "-" for letter in socket.gethostname())
    return f"{host[:_HOST_LETTERS]}-{os.getpid()}-{secrets.token_hex(4)}"


class Presence:
    """The presence of one trainer. Only the first rank uses it."""

    def __init__(self, directory: Path, process: str) -> None:
        self._directory = directory
        self._process = process
        self._lock: IO[str] | None = None

    def announce(self) -> None:
        """Show this process as alive to others. The file is locked before it gets its name, so nobody sees it
        unlocked.

        Raises ConfigurationError if the file cannot be written.
        """
        hidden = self._directory / f".{self._process}"
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            # The file object stays open for life, because closing it would release the lock.
            self._lock = hidden.open("w")
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            self._lock.write(socket.gethostname())
            self._lock.flush()
            hidden.rename(self._directory / self._process)
        except OSError as error:
            raise ConfigurationError(f"trainer.weights.directory: cannot write {hidden}: {error}") from error

    def dead(self) -> list[str]:
        """Return the trainers of this machine that ended without calling `leave`."""
        here = socket.gethostname()
        names = sorted(path.name for path in self._directory.glob("*") if not path.name.startswith("."))
        return [name for name in names if name != self._process and _is_dead(self._directory / name, here)]

    def forget(self, process: str) -> None:
        """Remove a dead trainer, whose claims have been given back."""
        (self._directory / process).unlink(missing_ok=True)

    def leave(self) -> None:
        """Remove this trainer, whose claims have been given back as far as possible."""
        if self._lock is not None:
            self.forget(self._process)
            self._lock.close()
            self._lock = None


def _is_dead(file: Path, here: str) -> bool:
    try:
        with file.open() as stream:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return stream.read() == here
    except OSError:  # locked by a live trainer, or already removed
        return False
