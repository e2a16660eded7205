"""Every preset that learns from rewards, on two tasks: `python -m benchmarks.learning [--short]`.

Target: each preset ends at a mean reward of 0.85 or more, in every seed and at staleness 0 and 2. Writes
`benchmarks/results/learning.json`, draws the curves into `docs/images/`, and prints the figures last; the exit status
says whether the target was reached. Interrupted, it goes on where it was when it is started again.
`--short` takes one seed at staleness 0 and 2; neither that nor a part of the runs is written.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from benchmarks.learning.journal import Journal
from benchmarks.learning.report import figures_in, judged, shown
from benchmarks.learning.run import Curve, Run, learn
from benchmarks.learning.tasks import TASKS
from benchmarks.machine import describe
from trainer.algorithm.presets import PRESETS

REWARDED = [name for name, algorithm in PRESETS.items() if algorithm.learns_from_rewards]
"""What rewards teach is measured; the tasks have no teacher."""
RESULT = Path(__file__).parent.parent / "results" / "learning.json"
SEEDS = 3
JOURNAL = Path(".base-rl") / "bench-learning.jsonl"


def measure(runs: list[Run], jobs: int, journal: Journal) -> dict[Run, Curve]:
    """As many at once as asked, each on one core; what the journal has is not run again."""
    known = journal.read()
    found = {run: known[run] for run in runs if run in known}
    if found:
        print(f"{len(found)} of {len(runs)} runs are there from before", flush=True)
    began = time.monotonic()
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        under_way = {pool.submit(learn, run): run for run in runs if run not in found}
        for done in as_completed(under_way):
            run, curve = under_way[done], done.result()
            journal.add(run, curve)
            found[run] = curve
            reached = "never" if curve.steps_to_090 is None else f"after {curve.steps_to_090} steps"
            print(
                f"{time.monotonic() - began:6.0f} s  {len(found)}/{len(runs)}  {run.task} {run.preset}, seed"
                f" {run.seed}, staleness {run.staleness}: 0.9 {reached}, {curve.final:.2f} in the end",
                flush=True,
            )
    return found


def result_of(found: dict[Run, Curve]) -> dict[str, Any]:
    """By preset and staleness: lists over the seeds; those of further tasks under the task's name beside them."""
    result: dict[str, Any] = {}
    for run in sorted(found, key=lambda run: (list(TASKS).index(run.task), run.preset, run.staleness, run.seed)):
        curve = found[run]
        at = result.setdefault(run.preset, {}).setdefault(f"staleness_{run.staleness}", {})
        kept = figures_in(at, run.task)
        kept.setdefault("steps_to_090", []).append(curve.steps_to_090)
        kept.setdefault("final", []).append(round(curve.final, 4))
        kept.setdefault("rewards", []).append([round(reward, 3) for reward in curve.rewards])
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=REWARDED, action="append", help="default: all")
    parser.add_argument("--task", choices=TASKS, action="append", help="default: both")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="of each (default: %(default)s)")
    parser.add_argument("--staleness", type=int, action="append", help="versions behind; default: 0, 2 and 4")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="runs at once (default: the cores)")
    parser.add_argument("--journal", type=Path, default=JOURNAL, help="finished runs (default: %(default)s)")
    parser.add_argument("--short", action="store_true", help="one seed, staleness 0 and 2; nothing is written")
    options = parser.parse_args()
    staleness: Iterable[int] = options.staleness or ((0, 2) if options.short else (0, 2, 4))
    runs = [
        Run(task=task, preset=preset, seed=seed, staleness=versions)
        for task in options.task or TASKS
        for versions in staleness
        for seed in range(1 if options.short else options.seeds)
        for preset in options.preset or REWARDED
    ]
    journal = Journal(options.journal)
    result = {"machine": describe(), **result_of(measure(runs, options.jobs, journal))}
    is_part = options.preset or options.task or options.staleness or options.short or options.seeds < SEEDS
    if not is_part:
        from benchmarks.learning.plot import draw

        RESULT.write_text(json.dumps(result, indent=1) + "\n")
        draw(result)
        journal.remove()
    print(shown(result))
    return 0 if all(target.reached for target in judged(result)) else 1


if __name__ == "__main__":
    sys.exit(main())
