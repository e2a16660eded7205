"""`make bench-gate`: bad versions are kept from users or taken back, and good ones are not, by drawn rewards on a
real store. Fails unless the targets below are reached.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.gates import experiments
from benchmarks.targets import Target

_RESULTS = Path(__file__).resolve().parents[1] / "results" / "gate.json"
_DROPS = (0.4, 0.6, 0.3)
_DROP = 0.4
_ERROR_RATE = 0.05
_PARTS = ("poisoned", "hacking", "healthy", "canaries", "detection")

Map = Callable[[Callable[[Any], dict[str, Any]], Iterable[Any]], Iterable[dict[str, Any]]]


def main() -> int:
    """Run the parts, write the results, and return 1 if a target was missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true", help="2 runs of each, 10 healthy steps; writes no results")
    parser.add_argument("--parts", nargs="*", choices=_PARTS, default=_PARTS, help="the others keep their results")
    parser.add_argument("--processes", type=int, default=2, help="runs at the same time")
    options = parser.parse_args()
    runs, steps, canaries = (2, 10, 2) if options.short else (20, 200, 5)
    results: dict[str, Any] = {}
    with ProcessPoolExecutor(options.processes) as pool:
        for part in options.parts:
            found = _measured(part, pool.map, runs=runs, steps=steps, canaries=canaries)
            # Read again: another process may have written other parts meanwhile.
            results = _merged(results if options.short else _stored(), found)
            if not options.short:
                _RESULTS.write_text(json.dumps(results, indent=2) + "\n")
            print(f"{part} done", flush=True)
    print(json.dumps({name: value for name, value in results.items() if name != "canary_curve"}, indent=2))
    if set(options.parts) != set(_PARTS):
        return 0
    if not options.short:
        from benchmarks.gates.plot import draw

        draw(results)
    targets = _targets(results)
    for target in targets:
        print(f"{'ok    ' if target.reached else 'MISSED'} {target.what}: {target.measured:.3f}")
    return 0 if all(target.reached for target in targets) else 1


def _stored() -> dict[str, Any]:
    stored: dict[str, Any] = json.loads(_RESULTS.read_text()) if _RESULTS.exists() else {}
    return stored


def _merged(results: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    healthy = {**results.get("healthy", {}), **found.get("healthy", {})}
    return {**results, **found, "healthy": healthy, "machine": machine.describe()}


def _measured(part: str, run_all: Map, *, runs: int, steps: int, canaries: int) -> dict[str, Any]:
    """Run one part, and return the keys of the results that it gives."""
    if part == "poisoned":
        gated = list(run_all(experiments.poisoned_gated, range(runs)))
        immediate = list(run_all(experiments.poisoned_immediate, [(seed, _DROP) for seed in range(runs)]))
        poisoned = {
            "served_beyond_canary": sum(found["served_beyond_canary"] for found in gated),
            "canary_sessions": sorted(found["sessions"] for found in gated),
            "recovered": sum(found["recovered"] for found in immediate),
            "of": runs,
            "drop": _DROP,
            "sessions_to_rollback": sorted(found["sessions"] for found in immediate),
        }
        return {"poisoned": poisoned, "canary_curve": next(found["curve"] for found in gated if found["curve"])}
    if part == "hacking":
        stopped = list(run_all(experiments.hacking, range(runs)))
        evaluated = sum(found["evaluated"] for found in stopped)
        hacking = {
            "stopped": sum(found["stopped"] for found in stopped),
            "of": runs,
            "held_out_lost": sorted(found["held_out_lost"] for found in stopped),
        }
        return {
            "hacking": hacking,
            "evaluation_share": evaluated / (evaluated + sum(found["sessions"] for found in stopped)),
        }
    if part == "healthy":
        healthy = list(run_all(experiments.healthy_immediate, [(seed, steps) for seed in range(runs)]))
        return {
            "healthy": {
                "false_alarm_rate": sum(found["rolled_back"] > 0 for found in healthy) / runs,
                "versions_rolled_back": sum(found["rolled_back"] for found in healthy),
                "steps": sum(found["steps"] for found in healthy),
                "runs": runs,
            }
        }
    if part == "canaries":
        canary = list(run_all(experiments.healthy_gated, [(seed, canaries) for seed in range(runs)]))
        refused, tried = (sum(found[name] for found in canary) for name in ("refused", "steps"))
        return {"healthy": {"canaries_refused": refused, "canaries": tried}}
    detection = []
    for drop in _DROPS:
        found = list(run_all(experiments.poisoned_immediate, [(seed, drop) for seed in range(runs)]))
        detected = sorted(each["sessions"] for each in found if each["detected"])
        detection.append({"drop": drop, "detected": len(detected), "of": runs, "sessions": detected})
    return {"detection": sorted(detection, key=lambda each: float(str(each["drop"])))}


def _targets(results: dict[str, Any]) -> list[Target]:
    poisoned, healthy = results["poisoned"], results["healthy"]
    return [
        Target(what="sessions of bad versions beyond canaries", measured=poisoned["served_beyond_canary"], bound=0),
        Target(
            what="runs back at the reward before", measured=poisoned["recovered"], bound=poisoned["of"], at_least=True
        ),
        Target(what="healthy runs with a rollback", measured=healthy["false_alarm_rate"], bound=_ERROR_RATE),
        Target(
            what="healthy canaries refused",
            measured=healthy["canaries_refused"] / healthy["canaries"],
            bound=_ERROR_RATE,
        ),
        Target(what="hacking stopped", measured=results["hacking"]["stopped"], bound=poisoned["of"], at_least=True),
    ]


if __name__ == "__main__":
    sys.exit(main())
