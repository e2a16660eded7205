"""A journal of finished runs, from which an interrupted measurement continues."""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import json
from pathlib import Path

from benchmarks.learning.run import Curve, Run

ROOT = Path(__file__).parents[2]
_LEARNT_BY = ("trainer", "benchmarks/learning", "agents_examples/calculator")


class Journal:
    """A file with one line for each finished run, to which several processes may append. Incomplete lines and runs of
    other code are ignored."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._code = code_digest(ROOT)

    def read(self) -> dict[Run, Curve]:
        found: dict[Run, Curve] = {}
        lines = self._path.read_text().splitlines() if self._path.exists() else []
        for line in lines:
            try:
                entry = json.loads(line)
            except json.JSONDecodeError:
                continue
            if entry["code"] == self._code:
                curve = entry["curve"]
                found[Run(**entry["run"])] = Curve(**{**curve, "rewards": tuple(curve["rewards"])})
        return found

    def add(self, run: Run, curve: Curve) -> None:
        entry = {"code": self._code, "run": dataclasses.asdict(run), "curve": dataclasses.asdict(curve)}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # a line is longer than the system appends atomically
            if file.tell() and not self._path.read_bytes().endswith(b"\n"):
                file.write("\n")  # after a line that was cut off
            file.write(f"{json.dumps(entry)}\n")
            file.flush()  # before the lock is released

    def remove(self) -> None:
        self._path.unlink(missing_ok=True)


def code_digest(root: Path, *more: str) -> str:
    """Return the hash of all code and data that determine a run; `more` are further directories."""
    digest = hashlib.sha256()
    for part in (*_LEARNT_BY, *more):
        for file in sorted((root / part).rglob("*")):
            if file.suffix in {".py", ".json", ".jinja", ".safetensors"}:
                digest.update(file.relative_to(root).as_posix().encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()
