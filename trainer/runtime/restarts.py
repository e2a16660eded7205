"""What ranks leave to their launcher (`launch.py`), and to those that are started in their place.

A rank that cannot go on ends, and its peers then fail in the collectives that they wait in. The first one's words say
why: they are the launcher's, and peers say whom they lost.

A rank cannot leave the collectives that its peers wait in, so a step that does not fit ends all of them. The one that
it did not fit for writes down how small micro-batches are to be from then on, and the launcher, whose directory it
is, starts all of them once more.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from pathlib import Path
from typing import TypeVar
from uuid import uuid4

import msgspec

_Message = TypeVar("_Message", bound=msgspec.Struct)

STATUS = 75
"""Exit status of a rank that asks for all of them to be started again."""

_DIRECTORY, _LAUNCHER = "BASE_RL_TRAINER_RESTARTS", "BASE_RL_TRAINER_LAUNCHER"
_ASKED, _GRANTED, _WORDS = "asked", "granted-", "words"
_PR_SET_PDEATHSIG = 1


class SmallerBound(msgspec.Struct, frozen=True, kw_only=True):
    """`version` is the head of the run from which the step was tried."""

    run: str
    version: int
    max_tokens_per_microbatch: int


class LastWords(msgspec.Struct, frozen=True, kw_only=True):
    """Of a rank that ends with this exit status."""

    rank: int
    status: int
    reason: str


class Restarts:
    """Of one launcher, for as long as it lives. Each run that it trains has a bound of its own."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    @staticmethod
    def of_launcher() -> Restarts | None:
        """None in a process that nobody would start again."""
        directory = os.environ.get(_DIRECTORY)
        return None if directory is None else Restarts(Path(directory))

    def tell_processes(self) -> None:
        """Those that are started from here on."""
        os.environ[_DIRECTORY] = str(self._directory)
        os.environ[_LAUNCHER] = str(os.getpid())

    def ask(self, bound: SmallerBound) -> None:
        """Whoever is first is heard; others that ask at the same time are out of memory in the same step."""
        self._leave(_ASKED, bound)

    def say(self, words: LastWords) -> None:
        """Whoever is first is heard."""
        self._leave(_WORDS, words)

    def said(self) -> LastWords | None:
        """By those that run, or ran last."""
        return self._read(_WORDS, LastWords)

    def grant(self) -> bool:
        """Whether the ranks that have ended asked to be started again; those that come now find the bound."""
        asked = self._read(_ASKED, SmallerBound)
        if asked is None:
            return False
        (self._directory / _WORDS).unlink(missing_ok=True)
        (self._directory / _ASKED).rename(self._directory / _granted(asked.run))
        return True

    def granted(self, run: str) -> SmallerBound | None:
        """What those before asked for last in this run."""
        return self._read(_granted(run), SmallerBound)

    def _leave(self, name: str, message: msgspec.Struct) -> None:
        """Where nothing of that name is yet."""
        mine = self._directory / uuid4().hex
        mine.write_bytes(msgspec.json.encode(message))
        with contextlib.suppress(FileExistsError):
            os.link(mine, self._directory / name)
        mine.unlink()

    def _read(self, name: str, kind: type[_Message]) -> _Message | None:
        try:
            return msgspec.json.decode((self._directory / name).read_bytes(), type=kind)
        except FileNotFoundError:
            return None


def end_with_launcher() -> None:
    """On Linux the kernel sends this process SIGTERM when its launcher is gone, however that ended: ranks have
    sessions of their own, which nobody else would end."""
    launcher = os.environ.get(_LAUNCHER)
    if launcher is None or not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(launcher):
        os.kill(os.getpid(), signal.SIGTERM)


def _granted(run: str) -> str:
    return _GRANTED + run.encode().hex()
