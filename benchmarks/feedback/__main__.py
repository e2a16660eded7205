"""Learning from words, words of other sessions, numbers, comparisons and follow-ups: `python -m benchmarks.feedback`.

Targets, for each of three seeds: from words the reward rises from at most 0.35 to at least 0.85; with words of other
sessions of the batch it ends no higher than it started; from a relative judge that is right in 80 % of its
comparisons, and from the user's next messages, it ends at 0.85 or more.

Writes `benchmarks/results/feedback.json`, draws its curves (`docs/images/learning-feedback.svg`) and prints the table
of `docs/performance.md`; the exit status says whether the targets were reached. About ten minutes of a core.

`--draw` draws the curves of the file, and measures nothing.

`--only KIND` measures some kinds and keeps the others' figures of the file.

`--short` shows in half a minute that everything runs, with an untrained model: it judges and writes nothing.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.feedback.base import make_base
from benchmarks.feedback.plot import draw
from benchmarks.feedback.report import judged, page
from benchmarks.feedback.run import JUDGED, KINDS, Kind, Run, figures, learn
from benchmarks.learning.tasks import CHECKPOINT
from benchmarks.machine import describe

RESULT = Path(__file__).parent.parent / "results" / "feedback.json"
SEEDS = (0, 1, 2)


def measure(kinds: Sequence[Kind], *, jobs: int, short: bool) -> dict[str, Any]:
    """Make the model, take the runs of these kinds, and return the figures by kind."""
    seeds = SEEDS[:1] if short else SEEDS
    size = {"steps": 2, "sessions": 8} if short else {}
    with tempfile.TemporaryDirectory(prefix="base-rl-feedback-") as directory:
        base = Path(directory) / "base"
        if not JUDGED.keys() >= set(kinds):
            make_base(base, seed=0, short=short)
            print("the model is made", flush=True)
        # Spawned: a fork of a process that has run torch may hang in its threads' locks.
        with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
            under_way = {
                kind: [
                    pool.submit(learn, Run(kind=kind, seed=seed, **size), CHECKPOINT if kind in JUDGED else base)
                    for seed in seeds
                ]
                for kind in kinds
            }
            found: dict[str, Any] = {
                kind: figures([each.result() for each in runs]) for kind, runs in under_way.items()
            }
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.feedback")
    parser.add_argument("--short", action="store_true", help="show that it runs; judge and write nothing")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, one core each")
    parser.add_argument("--only", action="append", choices=KINDS, help="measure this kind; may be repeated")
    parser.add_argument("--draw", action="store_true", help="draw the curves of the last measurement")
    options = parser.parse_args()
    if options.draw:
        draw(json.loads(RESULT.read_text()))
        return 0
    began = time.monotonic()
    found = measure(options.only or KINDS, jobs=options.jobs, short=options.short)
    if options.only:
        # The others' figures keep the machine of their own measurement.
        found = {kind: figures | {"machine": describe()} for kind, figures in found.items()}
        found = {**json.loads(RESULT.read_text()), **found}
    print(page(found))
    if options.short:
        return 0
    result = found if options.only else {**found, "seconds": round(time.monotonic() - began), "machine": describe()}
    RESULT.write_text(json.dumps(result, indent=2) + "\n")
    draw(result)
    reached = judged(result)
    for target, is_reached in reached:
        print(f"{'reached' if is_reached else 'MISSED'}: {target}")
    return 0 if all(is_reached for _, is_reached in reached) else 1


if __name__ == "__main__":
    sys.exit(main())
