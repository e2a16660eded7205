"""`make bench-gate`: bad versions are kept from users or taken back, and good ones are not, by drawn rewards on a
real store. Fails unless the targets below are reached.
"""

from __future__ import annotations

import argparse
import json
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import machine
from benchmarks.gates import experiments
from benchmarks.targets import Target

_RESULTS = Path(__file__).resolve().parents[1] / "results" / "gate.json"
_DROPS = (0.2, 0.3, 0.4, 0.6)
_DROP = 0.4
_ERROR_RATE = 0.05
_PROCESSES = 4


def main() -> int:
    """Run the experiments, write the results, and return 1 if a target was missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true", help="2 runs of each, 10 healthy steps; writes no results")
    short = parser.parse_args().short
    runs, steps, canaries = (2, 10, 2) if short else (20, 200, 10)
    with ProcessPoolExecutor(_PROCESSES) as pool:
        gated = list(pool.map(experiments.poisoned_gated, range(runs)))
        stopped = list(pool.map(experiments.hacking, range(runs)))
        cases = [(seed, drop) for drop in _DROPS for seed in range(runs)]
        immediate = list(pool.map(experiments.poisoned_immediate, cases))
        by_drop = {
            drop: [found for case, found in zip(cases, immediate, strict=True) if case[1] == drop] for drop in _DROPS
        }
        canary = list(pool.map(experiments.healthy_gated, [(seed, canaries) for seed in range(runs)]))
        healthy = list(pool.map(experiments.healthy_immediate, [(seed, steps) for seed in range(runs)]))
    results = _results(gated, stopped, by_drop, canary, healthy)
    print(json.dumps({name: value for name, value in results.items() if name != "canary_curve"}, indent=2))
    targets = _targets(results, runs)
    for target in targets:
        print(f"{'ok    ' if target.reached else 'MISSED'} {target.what}: {target.measured:.3f}")
    if not short:
        _RESULTS.write_text(json.dumps(results, indent=2) + "\n")
    return 0 if all(target.reached for target in targets) else 1


def _results(
    gated: list[dict[str, Any]],
    stopped: list[dict[str, Any]],
    by_drop: dict[float, list[dict[str, Any]]],
    canary: list[dict[str, Any]],
    healthy: list[dict[str, Any]],
) -> dict[str, Any]:
    poisoned = by_drop[_DROP]
    healthy_steps = sum(found["steps"] for found in healthy)
    evaluated = sum(found["evaluated"] for found in stopped)
    return {
        "machine": machine.describe(),
        "poisoned": {
            "served_beyond_canary": sum(found["served_beyond_canary"] for found in gated),
            "canary_sessions": sorted(found["sessions"] for found in gated),
            "recovered": sum(found["recovered"] for found in poisoned),
            "of": len(poisoned),
            "drop": _DROP,
            "sessions_to_rollback": sorted(found["sessions"] for found in poisoned),
        },
        "detection": [
            {
                "drop": drop,
                "detected": sum(found["detected"] for found in runs),
                "of": len(runs),
                "sessions": sorted(found["sessions"] for found in runs if found["detected"]),
            }
            for drop, runs in by_drop.items()
        ],
        "healthy": {
            "false_alarm_rate": sum(found["rolled_back"] > 0 for found in healthy) / len(healthy),
            "versions_rolled_back": sum(found["rolled_back"] for found in healthy),
            "steps": healthy_steps,
            "runs": len(healthy),
            "canaries_refused": sum(found["refused"] for found in canary),
            "canaries": sum(found["steps"] for found in canary),
        },
        "hacking": {
            "stopped": sum(found["stopped"] for found in stopped),
            "of": len(stopped),
            "held_out_lost_median": median(found["held_out_lost"] for found in stopped),
        },
        "evaluation_share": evaluated / (evaluated + sum(found["sessions"] for found in stopped)),
        "canary_curve": next((found["curve"] for found in gated if found["curve"]), []),
    }


def _targets(results: dict[str, Any], runs: int) -> list[Target]:
    poisoned, healthy = results["poisoned"], results["healthy"]
    return [
        Target(what="sessions of bad versions beyond canaries", measured=poisoned["served_beyond_canary"], bound=0),
        Target(what="runs back at the reward before", measured=poisoned["recovered"], bound=runs, at_least=True),
        Target(what="healthy runs with a rollback", measured=healthy["false_alarm_rate"], bound=_ERROR_RATE),
        Target(
            what="healthy canaries refused",
            measured=healthy["canaries_refused"] / healthy["canaries"],
            bound=_ERROR_RATE,
        ),
        Target(what="hacking stopped", measured=results["hacking"]["stopped"], bound=runs, at_least=True),
    ]


if __name__ == "__main__":
    sys.exit(main())
