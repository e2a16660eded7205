"""Finished attempts, one line of JSON each, so that a run of attempts that was interrupted can continue.

The first line has the series: a name that all groups of these attempts share, and no groups of other journals.
"""

from __future__ import annotations

import json
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from proxy.cli.console import Refused


@dataclass(frozen=True, kw_only=True)
class Finished:
    """A finished attempt. `problem` says why it failed; a failed attempt has no reward."""

    task: str
    number: int
    """Counts the attempts at the task, from 0."""
    session_id: str
    seconds: float
    reward: float | None = None
    problem: str | None = None

    @property
    def key(self) -> tuple[str, int]:
        return self.task, self.number


class Journal:
    """The file of finished attempts. A line that a kill cut off is ignored, and its attempt is repeated."""

    def __init__(self, path: Path | None) -> None:
        """Read the file if there is one; None: remember nothing. Raise Refused if it is no journal."""
        self.finished: dict[tuple[str, int], Finished] = {}
        self.series = uuid.uuid4().hex[:12]
        self._path = path
        self._file = None
        if path is None:
            return
        try:
            text = path.read_text(encoding="utf-8") if path.exists() else ""
            header, *lines = text.split("\n")
            if lines:
                self.series = self._series(header)
                self.finished = {one.key: one for one in map(self._finished, lines[:-1])}
            # A kill may have cut off the last line, which what is appended must not continue.
            whole = len(text.encode()) - len((lines or [header])[-1].encode())
            self._file = path.open("a", encoding="utf-8")
            self._file.truncate(whole)
        except (OSError, UnicodeDecodeError) as error:
            raise Refused(f"cannot use the journal {path}: {error}") from error
        if not lines:
            self._write({"series": self.series})

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()

    def add(self, finished: Finished) -> None:
        """Remember an attempt. Failed ones are written too, and attempted again by the next run."""
        self.finished[finished.key] = finished
        self._write(asdict(finished))

    def has(self, task: str, number: int) -> bool:
        """Return whether the attempt was finished without a failure."""
        found = self.finished.get((task, number))
        return found is not None and found.problem is None

    def _write(self, line: dict[str, Any]) -> None:
        if self._file is not None:
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()

    def _series(self, line: str) -> str:
        try:
            return str(json.loads(line)["series"])
        except (ValueError, TypeError, KeyError) as error:
            raise Refused(f"{self._path} is no journal of attempts: choose another file") from error

    def _finished(self, line: str) -> Finished:
        try:
            return Finished(**json.loads(line))
        except (ValueError, TypeError) as error:
            raise Refused(f"{self._path} is no journal of attempts: choose another file") from error
