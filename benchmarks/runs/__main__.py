"""Many adapter runs on one engine and one trainer: `python -m benchmarks.runs [--short]`, or `make bench-runs`.

Eight runs of the calculator over one base model, each with another reward rule (`rules.py`), learn at the same time:
one embedded engine, one trainer, one proxy, on two cores. Beside it the same runs one after another, each in an
installation of its own, with adapters and with whole weights; and four of the runs likewise on the real SGLang.

Writes `benchmarks/results/runs.json` and prints the figures last; the exit status is 0 if the targets were reached.
An interrupted measurement continues with the part that it was at. `--short` runs the largest installation for a
few seconds, on the embedded engine alone unless others are named, to show that it runs; it writes and judges nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

from benchmarks.machine import describe
from benchmarks.runs.parts import Effort, Part, measure, parts_of
from benchmarks.runs.report import judged, page, shown, summary, verdict
from benchmarks.runs.rules import RULES

ROOT = Path(__file__).parents[2]
RESULT = ROOT / "benchmarks" / "results" / "runs.json"
JOURNAL = Path(".base-rl") / "bench-runs.json"
EMBEDDED, SGLANG = "embedded", "sglang"
RUNS = {
    EMBEDDED: tuple(RULES),
    SGLANG: ("solves", "breaks-the-call", "guesses-one-digit-even", "guesses-four-digits"),
}
EFFORT = Effort(sessions=1280, evaluated=128)
SHORT = Effort(sessions=64, evaluated=8)
_DETERMINED_BY = ("proxy", "trainer", "benchmarks/runs", "agents_examples/calculator")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--engines", nargs="+", choices=list(RUNS), help="default: both; of --short, the embedded one"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--short", action="store_true", help="the runs together, some seconds each; nothing is written"
    )
    options = parser.parse_args()
    chosen: list[str] = options.engines or (["embedded"] if options.short else list(RUNS))
    if hasattr(os, "sched_setaffinity"):  # whatever is started inherits it
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
    if options.short:
        for engine in chosen:
            part = parts_of(engine, RUNS[engine])[0]
            print(shown(part.name, asyncio.run(measure(part, SHORT, options.seed))))
        return 0
    journal = Journal(JOURNAL, key=f"{options.seed} {EFFORT}")
    result: dict[str, Any] = {"machine": describe()}
    for engine in chosen:
        parts = parts_of(engine, RUNS[engine])
        for number, part in enumerate(parts, start=1):
            if journal.find(part) is None:
                print(f"{part.name} ({number} of {len(parts)})", flush=True)
                journal.add(part, asyncio.run(measure(part, EFFORT, options.seed)))
                print(shown(part.name, journal[part]), flush=True)
        result[engine] = summary({part: journal[part] for part in parts})
    engines = tuple(chosen)
    print(verdict(result, engines))
    before = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    result = {**before, **result}
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    print(f"\nfor docs/performance.md:\n\n{page(result)}")
    JOURNAL.unlink(missing_ok=True)
    return 0 if all(target.reached for engine in engines for target in judged(engine, result[engine])) else 1


class Journal:
    """A file with the figures of finished parts, from which an interrupted measurement continues. Figures of other
    code, or of another `key`, are ignored."""

    def __init__(self, path: Path, key: str) -> None:
        self._path = path
        self._key = f"{key} {_code_digest()}"
        self._found: dict[str, dict[str, Any]] = {}
        if path.exists():
            stored = json.loads(path.read_text())
            if stored["key"] == self._key:
                self._found = stored["parts"]

    def find(self, part: Part) -> dict[str, Any] | None:
        return self._found.get(part.name)

    def __getitem__(self, part: Part) -> dict[str, Any]:
        return self._found[part.name]

    def add(self, part: Part, figures: dict[str, Any]) -> None:
        """Record a finished part, atomically."""
        self._found[part.name] = figures
        self._path.parent.mkdir(parents=True, exist_ok=True)
        partial = self._path.with_suffix(".partial")
        partial.write_text(json.dumps({"key": self._key, "parts": self._found}, indent=1))
        partial.replace(self._path)


def _code_digest() -> str:
    """Return the hash of the code and data that determine the figures."""
    digest = hashlib.sha256()
    for folder in _DETERMINED_BY:
        for file in sorted((ROOT / folder).rglob("*")):
            if file.suffix in {".py", ".json", ".jinja", ".safetensors"}:
                digest.update(file.relative_to(ROOT).as_posix().encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


if __name__ == "__main__":
    sys.exit(main())
