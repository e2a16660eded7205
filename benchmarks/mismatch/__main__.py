"""Find the corrections that keep learning from a wrong engine: `python -m benchmarks.mismatch [--short]`.

The demo's task is learnt through an engine with noise on its logits, with weights rounded to 8 bits, or with weights
of some versions ago under the name of the newest; and through a correct engine. The learnt weights are evaluated on
a correct engine. Targets, on medians over the seeds: without a correction some fault costs 0.2 or more of the final
reward; with the default no fault costs more than 0.05.

Writes `benchmarks/results/mismatch.json` and prints the figures last; the exit status is 0 if the targets were
reached. A run takes half a minute of a core: all 69 take 20 minutes on two idle cores, `--short` (one seed,
three steps) two minutes. `--faults`, `--corrections` and `--seeds` select a part of the runs. Finished runs are kept
in a journal, so that parts add up, and the result is written once all are there.
"""

from __future__ import annotations

import argparse
import dataclasses
import fcntl
import json
import multiprocessing
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

from benchmarks.learning.journal import ROOT, code_digest
from benchmarks.machine import describe
from benchmarks.mismatch.engines import ENGINES
from benchmarks.mismatch.report import judged, result_of, shown
from benchmarks.mismatch.run import CORRECTIONS, ON_A_CORRECT_ENGINE, Found, Run, learn

RESULT = Path(__file__).parent.parent / "results" / "mismatch.json"
JOURNAL = Path(".base-rl") / "bench-mismatch.jsonl"
SEEDS = (0, 1, 2)
SHORT_STEPS = 3


def read(journal: Path, code: str) -> dict[Run, Found]:
    """Return the finished runs of this code; an incomplete line is ignored."""
    found: dict[Run, Found] = {}
    for line in journal.read_text().splitlines() if journal.exists() else []:
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:
            continue
        if entry["code"] == code:
            found[Run(**entry["run"])] = Found(**entry["found"])
    return found


def add(journal: Path, code: str, run: Run, found: Found) -> None:
    entry = {"code": code, "run": dataclasses.asdict(run), "found": dataclasses.asdict(found)}
    journal.parent.mkdir(parents=True, exist_ok=True)
    with journal.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # several processes may append at once
        file.write(f"\n{json.dumps(entry)}" if file.tell() else json.dumps(entry))
        file.flush()  # before the lock is released


def measure(runs: Sequence[Run], jobs: int, journal: Path | None) -> dict[Run, Found]:
    """Make the runs that the journal lacks, `jobs` at once, each on one core."""
    code = code_digest(ROOT, "benchmarks/mismatch")
    found = read(journal, code) if journal is not None else {}
    missing = [run for run in runs if run not in found]
    print(f"{len(runs) - len(missing)} of {len(runs)} runs are there from before", flush=True)
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        under_way = {pool.submit(learn, run): run for run in missing}
        for done in as_completed(under_way):
            run, found[under_way[done]] = under_way[done], done.result()
            if journal is not None:
                add(journal, code, run, found[run])
            print(
                f"{run.fault} {run.correction}, seed {run.seed}: {found[run].final:.2f} in the end,"
                f" {found[run].seconds:.0f} s of a core",
                flush=True,
            )
    return found


def is_measured(fault: str, correction: str) -> bool:
    return fault != "clean" or correction in ON_A_CORRECT_ENGINE


def _listed(text: str) -> list[str]:
    return [part for part in text.replace(",", " ").split() if part]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=_listed, default=list(ENGINES), help=f"of {', '.join(ENGINES)}")
    parser.add_argument(
        "--corrections", type=_listed, default=list(CORRECTIONS), help=f"of {', '.join(CORRECTIONS)} (default: all)"
    )
    parser.add_argument("--seeds", type=_listed, default=[str(seed) for seed in SEEDS], help="default: 0,1,2")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="runs at once (default: the cores)")
    parser.add_argument("--journal", type=Path, default=JOURNAL, help="finished runs (default: %(default)s)")
    parser.add_argument("--short", action="store_true", help="one seed, three steps, nothing is written or judged")
    options = parser.parse_args()
    for given, known in ((options.faults, ENGINES), (options.corrections, CORRECTIONS)):
        if unknown := set(given) - set(known):
            parser.error(f"unknown: {', '.join(sorted(unknown))}; choose from {', '.join(known)}")
    if not all(seed.isdecimal() for seed in options.seeds):
        parser.error("--seeds takes numbers, as 0,1,2")
    seeds = SEEDS[:1] if options.short else [int(seed) for seed in options.seeds]
    steps = {"steps": SHORT_STEPS} if options.short else {}
    runs = [
        Run(fault=fault, correction=correction, seed=seed, **steps)
        for seed in seeds
        for fault in options.faults
        for correction in options.corrections
        if is_measured(fault, correction)
    ]
    found = measure(runs, options.jobs, None if options.short else options.journal)
    result = {"machine": describe(), **result_of(found)}
    print(shown(result))
    if options.short:
        return 0
    whole = {
        Run(fault=f, correction=c, seed=seed)
        for seed in SEEDS
        for f in ENGINES
        for c in CORRECTIONS
        if is_measured(f, c)
    }
    if missing := whole - set(found):
        print(f"{len(missing)} of {len(whole)} runs are missing: {RESULT.name} is written once all are there")
        return 0
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    return 0 if all(target.reached for target in judged(result)) else 1


if __name__ == "__main__":
    sys.exit(main())
