"""Every preset that learns from rewards, on three tasks: `python -m benchmarks.learning [--short]`.

Target: each preset ends at a mean reward of 0.85 or more, in every seed and at staleness 0 and 2. Prints the figures
last; the exit status says whether the target was reached by all that was measured.

A run is one preset, task, seed and staleness, on one core. Finished runs are kept in a journal, so that an
interrupted measurement goes on where it was, and a long one can be taken in parts: `--presets`, `--tasks`, `--seeds`
and `--staleness` choose some, and several processes may share the journal. Once it holds all runs of the whole
measurement, whichever part came last, `benchmarks/results/learning.json` and the curves in `docs/images/` are
written, and the journal is removed. It counts only runs of the code as it is: a change to the trainer begins anew.

`--page` prints the tables of `docs/performance.md` from the result and measures nothing. `--short` takes one seed at
staleness 0 and 2.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from benchmarks.learning.journal import Journal
from benchmarks.learning.report import figures_in, judged, page, shown
from benchmarks.learning.run import Curve, Run, learn
from benchmarks.learning.tasks import TASKS
from benchmarks.machine import describe
from trainer.algorithm.presets import PRESETS

REWARDED = [name for name, algorithm in PRESETS.items() if algorithm.learns_from_rewards]
"""The measured presets. Those that learn from a teacher alone are omitted, because the tasks have none."""
RESULT = Path(__file__).parent.parent / "results" / "learning.json"
SEEDS = (0, 1, 2)
STALENESS = (0, 2, 4)
JOURNAL = Path(".base-rl") / "bench-learning.jsonl"


def chosen(
    tasks: Iterable[str] = TASKS,
    presets: Sequence[str] = REWARDED,
    seeds: Sequence[int] = SEEDS,
    staleness: Iterable[int] = STALENESS,
) -> list[Run]:
    """Return the runs of these presets, tasks, seeds and stalenesses; by default those of the whole measurement."""
    return [
        Run(task=task, preset=preset, seed=seed, staleness=versions)
        for task in tasks
        for versions in staleness
        for seed in seeds
        for preset in presets
    ]


def measure(runs: Sequence[Run], jobs: int, journal: Journal) -> dict[Run, Curve]:
    """Run `jobs` at once, each on one core, and return all curves. Runs in the journal are not repeated."""
    known = journal.read()
    found = {run: known[run] for run in runs if run in known}
    missing = [run for run in runs if run not in found]
    work, done = sum(map(_expected, missing)), 0.0
    print(
        f"{len(runs)} runs, {len(found)} of them finished before; {_minutes(work / jobs)} on idle cores", flush=True
    )
    began = time.monotonic()
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        under_way = {pool.submit(learn, run): run for run in missing}
        for ended in as_completed(under_way):
            run, curve = under_way[ended], ended.result()
            journal.add(run, curve)
            found[run] = curve
            done += _expected(run)
            left = (time.monotonic() - began) / done * (work - done)
            print(f"{len(found)}/{len(runs)}  {_told(run, curve)}; {_minutes(left)} left", flush=True)
    return found


def _expected(run: Run) -> float:
    """Return the approximate number of seconds of a core that the run takes."""
    return TASKS[run.task].seconds


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.0f} minutes"


def _told(run: Run, curve: Curve) -> str:
    reached = "never" if curve.steps_to_090 is None else f"after {curve.steps_to_090} steps"
    return (
        f"{run.task} {run.preset}, seed {run.seed}, staleness {run.staleness}: 0.9 {reached}, {curve.final:.2f} in"
        f" the end, {curve.seconds:.0f} s of a core"
    )


def result_of(found: Mapping[Run, Curve]) -> dict[str, Any]:
    """Return lists over the seeds, by preset, staleness and task. The first task's figures are also stored without
    its name, as in results with a single task."""
    result: dict[str, Any] = {}
    for run in sorted(found, key=lambda run: (list(TASKS).index(run.task), run.preset, run.staleness, run.seed)):
        curve = found[run]
        at = result.setdefault(run.preset, {}).setdefault(f"staleness_{run.staleness}", {})
        for kept in figures_in(at, run.task):
            kept.setdefault("steps_to_090", []).append(curve.steps_to_090)
            kept.setdefault("final", []).append(round(curve.final, 4))
            kept.setdefault("rewards", []).append([round(reward, 3) for reward in curve.rewards])
    return result


def seconds_of(found: Mapping[Run, Curve]) -> dict[str, float]:
    """Return the median seconds of a core that a run took, by task."""
    by_task = {task: [curve.seconds for run, curve in found.items() if run.task == task] for task in TASKS}
    return {task: round(statistics.median(seconds), 1) for task, seconds in by_task.items() if seconds}


def main() -> int:
    options = _options()
    if options.page:
        print(page(json.loads(RESULT.read_text())))
        return 0
    seeds = options.seeds or (SEEDS[:1] if options.short else SEEDS)
    staleness = options.staleness or (STALENESS[:2] if options.short else STALENESS)
    runs = chosen(options.tasks or TASKS, options.presets or REWARDED, seeds, staleness)
    journal = Journal(options.journal)
    found = measure(runs, options.jobs, journal)
    publish_if_whole(journal)
    result = result_of(found)
    print(shown(result))
    return 0 if all(target.reached for target in judged(result)) else 1


def _options() -> argparse.Namespace:
    costs = ", ".join(f"{task} {kind.seconds:.0f} s" for task, kind in TASKS.items())
    whole = sum(map(_expected, chosen())) / 3600
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.learning",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f"One run takes about so long on an idle core of an AMD EPYC: {costs}. All {len(chosen())} take"
        f" {whole:.1f} hours of a core.",
    )
    parser.add_argument("--presets", nargs="+", choices=REWARDED, metavar="PRESET", help="default: all")
    parser.add_argument(
        "--tasks", nargs="+", choices=TASKS, metavar="TASK", help=f"of {', '.join(TASKS)}; default: all"
    )
    parser.add_argument("--seeds", nargs="+", type=int, metavar="SEED", help="default: 0 1 2")
    parser.add_argument("--staleness", nargs="+", type=int, metavar="VERSIONS", help="default: 0 2 4")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="runs at once (default: the cores)")
    parser.add_argument("--journal", type=Path, default=JOURNAL, help="finished runs (default: %(default)s)")
    parser.add_argument("--short", action="store_true", help="one seed, staleness 0 and 2")
    parser.add_argument("--page", action="store_true", help="print the tables of the result, and measure nothing")
    return parser.parse_args()


def publish_if_whole(journal: Journal) -> None:
    """Write the result and its curves if every run of the whole measurement is in the journal."""
    known = journal.read()
    whole = chosen()
    missing = sum(run not in known for run in whole)
    if missing:
        print(f"the result is not written yet: {missing} of {len(whole)} runs are missing")
        return
    from benchmarks.learning.plot import draw

    found = {run: known[run] for run in whole}
    result = {"machine": describe(), "seconds_of_a_core": seconds_of(found), **result_of(found)}
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    draw(result)
    journal.remove()
    print(f"{RESULT} is written; put these tables into docs/performance.md:\n\n{page(result)}\n")


if __name__ == "__main__":
    sys.exit(main())
