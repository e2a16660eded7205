"""Messages of ranks to their launcher (`launch/`), and to the ranks that are started in their place.

A rank that cannot go on ends, and its peers then fail in the collectives in which they wait for it. The first rank
to report gives the cause; its peers report which rank they lost. A step that does not fit into one rank's memory
therefore ends all ranks. That rank writes down a smaller bound on micro-batches, and the launcher, to which the
directory belongs, starts all ranks once more.
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
"""Exit status of a rank that asks the launcher to start all ranks again."""

DIRECTORY_VARIABLE = "BASE_RL_TRAINER_RESTARTS"
_LAUNCHER = "BASE_RL_TRAINER_LAUNCHER"
_REQUEST, _GRANTED, _REPORT = "asked", "granted-", "words"
_PR_SET_PDEATHSIG = 1


class SmallerBound(msgspec.Struct, frozen=True, kw_only=True):
    """A smaller bound on micro-batches. `version` is the head from which the step was tried."""

    run: str
    version: int
    max_tokens_per_microbatch: int


class EndReport(msgspec.Struct, frozen=True, kw_only=True):
    """The report of a rank that ends with this exit status."""

    rank: int
    status: int
    reason: str


class Restarts:
    """Files by which the ranks of one launcher send it requests to restart, with a bound per run, and reports."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    @staticmethod
    def of_launcher() -> Restarts | None:
        """Return the messages of this process's launcher; None if no launcher would start it again."""
        directory = os.environ.get(DIRECTORY_VARIABLE)
        return None if directory is None else Restarts(Path(directory))

    def set_environment(self) -> None:
        """Set the directory in the environment of processes that are started from now on."""
        os.environ[DIRECTORY_VARIABLE] = str(self._directory)
        os.environ[_LAUNCHER] = str(os.getpid())

    def make_directory(self) -> None:
        """Make the directory if it does not exist."""
        self._directory.mkdir(parents=True, exist_ok=True)

    def request(self, bound: SmallerBound) -> None:
        """Ask for all ranks to be started again. Only the first request counts: other ranks that ask at the same
        time ran out of memory in the same step."""
        self._write_once(_REQUEST, bound)

    def report(self, end: EndReport) -> None:
        """Report why this rank ends. Only the first report counts."""
        self._write_once(_REPORT, end)

    def first_report(self) -> EndReport | None:
        """Return the first report of the ranks that run, or ran last."""
        return self._read(_REPORT, EndReport)

    def grant_request(self) -> bool:
        """Return whether the ended ranks asked to be started again. The bound is then stored for the ranks that
        follow."""
        request = self._read(_REQUEST, SmallerBound)
        if request is None:
            return False
        (self._directory / _REPORT).unlink(missing_ok=True)
        (self._directory / _REQUEST).rename(self._directory / _granted(request.run))
        return True

    def begin_again(self) -> None:
        """Grant what the ranks before asked for, and forget why they ended: for a launcher that ends with its
        ranks."""
        if not self.grant_request():
            (self._directory / _REPORT).unlink(missing_ok=True)

    def granted_bound(self, run: str) -> SmallerBound | None:
        """Return the bound that the ranks before asked for in this run."""
        return self._read(_granted(run), SmallerBound)

    def _write_once(self, name: str, message: msgspec.Struct) -> None:
        """Write a message, unless there is one of that name."""
        # A link is atomic and fails if the name exists: the first message wins, and it is complete when it appears.
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
    """Make the Linux kernel send this process SIGTERM when its launcher dies. Ranks have sessions of their own, so
    nothing else would end them."""
    launcher = os.environ.get(_LAUNCHER)
    if launcher is None or not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    # The launcher may have died before prctl took effect.
    if os.getppid() != int(launcher):
        os.kill(os.getpid(), signal.SIGTERM)


def _granted(run: str) -> str:
    return _GRANTED + run.encode().hex()
