"""Learning from ungrouped traffic: `python -m benchmarks.ungrouped [--short]`.

The calculator's agent in sessions without groups, each with one mark. Compared are the running mean of the run, that
of the first message (`task_by = first_message`), and shadow answers (`run.shadow`), on traffic in which every
question is new, and on traffic whose 64 questions recur and are marked in ranges of their own. Writes
`benchmarks/results/ungrouped.json` with the steps to a share of 0.9 of right answers, by seed. `--traffic` and
`--conditions` measure a part, which replaces that part of the result. All take about fifteen minutes of two cores.
`--short` takes one seed, and writes nothing.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.machine import describe
from benchmarks.ungrouped.run import CONDITIONS, TRAFFIC, learn

RESULT = Path(__file__).parent.parent / "results" / "ungrouped.json"
SEEDS = (0, 1, 2)


def measure(traffic: list[str], conditions: list[str], seeds: list[int], jobs: int) -> dict[str, Any]:
    """Return the figures by traffic and condition."""
    found: dict[str, Any] = {}
    # Spawned: a fork of a process that has run torch may hang in its threads' locks.
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        under_way = {
            (kind, name): [pool.submit(learn, kind, name, seed) for seed in seeds]
            for kind in traffic
            for name in conditions
        }
        for (kind, name), runs in under_way.items():
            curves = [run.result() for run in runs]
            steps = [curve.steps_to_090 for curve in curves]
            found.setdefault(kind, {})[name] = {
                "steps_to_090": steps,
                "final": [round(curve.final, 4) for curve in curves],
                "rewards": [[round(reward, 3) for reward in curve.rewards] for curve in curves],
            }
            print(f"{kind:20} {name:14} steps to 0.9: {steps}", flush=True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ungrouped", description=__doc__)
    parser.add_argument("--short", action="store_true", help="one seed; write nothing")
    parser.add_argument("--traffic", nargs="+", choices=TRAFFIC, default=list(TRAFFIC))
    parser.add_argument("--conditions", nargs="+", choices=CONDITIONS, default=list(CONDITIONS))
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, one core each")
    options = parser.parse_args()
    began = time.monotonic()
    seeds = list(SEEDS[:1] if options.short else SEEDS)
    found = measure(options.traffic, options.conditions, seeds, options.jobs)
    if not options.short:
        known = json.loads(RESULT.read_text()) if RESULT.exists() else {}
        result: dict[str, Any] = {kind: {**known.get(kind, {}), **found.get(kind, {})} for kind in TRAFFIC}
        result |= {"seconds": round(time.monotonic() - began), "machine": describe()}
        RESULT.write_text(json.dumps(result, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
