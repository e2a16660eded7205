"""Which trainers of a run live on this machine, told by locks that the kernel drops when their holder dies.

`DIRECTORY/PROCESS` holds the machine's name and is locked for as long as the process lives, however it ends. So a
trainer that starts can tell a dead one's claims, which nobody renews, from those of a live one beside it, and give
back the former at once. Of trainers on other machines nothing can be told: their leases run out.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import socket
from pathlib import Path
from typing import IO

from trainer.errors import ConfigurationError

_TOLD_OF_THE_HOST = 32


def new_process_name() -> str:
    """Never used before, and readable: machine, process id, chance."""
    host = "".join(letter if letter.isalnum() or letter in "-." else "-" for letter in socket.gethostname())
    return f"{host[:_TOLD_OF_THE_HOST]}-{os.getpid()}-{secrets.token_hex(4)}"


class Presence:
    """One trainer's. Only the first rank's is used."""

    def __init__(self, directory: Path, process: str) -> None:
        self._directory = directory
        self._process = process
        self._lock: IO[str] | None = None

    def announce(self) -> None:
        """From here on others see this process as alive. The file has its lock before it has its name.

        Raises ConfigurationError where there can be no such file.
        """
        hidden = self._directory / f".{self._process}"
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            self._lock = hidden.open("w")
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            self._lock.write(socket.gethostname())
            self._lock.flush()
            hidden.rename(self._directory / self._process)
        except OSError as error:
            raise ConfigurationError(f"trainer.weights.directory: cannot write {hidden}: {error}") from error

    def dead(self) -> list[str]:
        """The trainers of this machine that ended without a farewell."""
        here = socket.gethostname()
        names = sorted(path.name for path in self._directory.glob("*") if not path.name.startswith("."))
        return [name for name in names if name != self._process and _is_dead(self._directory / name, here)]

    def forget(self, process: str) -> None:
        """A dead one's claims have been given back."""
        (self._directory / process).unlink(missing_ok=True)

    def leave(self) -> None:
        """The farewell: claims have been given back, as far as that was possible."""
        if self._lock is not None:
            self.forget(self._process)
            self._lock.close()
            self._lock = None


def _is_dead(file: Path, here: str) -> bool:
    try:
        with file.open() as stream:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return stream.read() == here
    except OSError:  # locked by its living holder, or gone
        return False
