"""The parts of `make bench-gate`: each runs experiments, and returns the keys of the results that it gives."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from benchmarks.gates import experiments, real

DROP = 0.4
_DROPS = (0.4, 0.6, 0.3)
# Of a judge between the candidate and the serving version: equally good, worse, and much worse.
_SHARES_OF_WINS = (0.5, 0.35, 0.25)
# Drawing preferences costs little, and more candidates make the rates more exact.
_CANDIDATES_PER_RUN = 5

Map = Callable[[Callable[[Any], dict[str, Any]], Iterable[Any]], Iterable[dict[str, Any]]]


@dataclass(frozen=True, kw_only=True)
class Size:
    """How much is measured: `runs` of each experiment, with so many healthy steps, canaries, evaluated versions, and
    real sessions."""

    runs: int
    steps: int
    canaries: int
    evaluated: int
    learnt: int
    poisoned: int


WHOLE = Size(runs=20, steps=200, canaries=5, evaluated=10, learnt=1280, poisoned=768)
SHORT = Size(runs=2, steps=10, canaries=2, evaluated=2, learnt=192, poisoned=64)

Part = Callable[[Map, Size], dict[str, Any]]


def _poisoned(run_all: Map, size: Size) -> dict[str, Any]:
    gated = list(run_all(experiments.poisoned_gated, range(size.runs)))
    immediate = list(run_all(experiments.poisoned_immediate, [(seed, DROP) for seed in range(size.runs)]))
    poisoned = {
        "served_beyond_canary": sum(found["served_beyond_canary"] for found in gated),
        "canary_sessions": sorted(found["sessions"] for found in gated),
        "recovered": sum(found["recovered"] for found in immediate),
        "of": size.runs,
        "drop": DROP,
        "sessions_to_rollback": sorted(found["sessions"] for found in immediate),
    }
    return {"poisoned": poisoned, "canary_curve": next(found["curve"] for found in gated if found["curve"])}


def _hacking(run_all: Map, size: Size) -> dict[str, Any]:
    stopped = list(run_all(experiments.hacking, range(size.runs)))
    hacking = {
        "stopped": sum(found["stopped"] for found in stopped),
        "of": size.runs,
        "held_out_lost": sorted(found["held_out_lost"] for found in stopped),
        "evaluation_sessions": sum(found["evaluated"] for found in stopped),
        "live_sessions": sum(found["sessions"] for found in stopped),
    }
    return {"hacking": hacking}


def _evaluation(run_all: Map, size: Size) -> dict[str, Any]:
    """Measure the share of sessions that the gate `evaluation` costs by default: tasks over tasks plus live sessions
    of a version, a little more for the evaluation of the first version."""
    found = list(run_all(experiments.evaluated, [(seed, size.evaluated) for seed in range(size.runs)]))
    evaluated, live = (sum(each[name] for each in found) for name in ("evaluated", "sessions"))
    evaluation = {
        "tasks": experiments.EVALUATION_TASKS,
        "live_sessions_per_version": experiments.LIVE_SESSIONS,
        "evaluation_sessions": evaluated,
        "live_sessions": live,
        "versions": size.runs * size.evaluated,
        "refused": sum(each["refused"] for each in found),
    }
    return {"evaluation": evaluation, "evaluation_share": evaluated / (evaluated + live)}


def _preference(run_all: Map, size: Size) -> dict[str, Any]:
    preference = []
    for share in _SHARES_OF_WINS:
        runs = [(seed, share) for seed in range(_CANDIDATES_PER_RUN * size.runs)]
        found = list(run_all(experiments.preferred, runs))
        refused = sorted(each["pairs"] for each in found if each["refused"])
        preference.append({"share": share, "refused": len(refused), "of": len(found), "pairs": refused})
    return {"preference": preference}


def _guards(run_all: Map, size: Size) -> dict[str, Any]:
    guarded = list(run_all(experiments.guarded, range(size.runs)))
    guards = {
        "stopped": sum(found["stopped"] for found in guarded),
        "of": size.runs,
        "canary_sessions": sorted(found["sessions"] for found in guarded),
        "by": dict(Counter(name for found in guarded for name in found["guards"])),
    }
    return {"guards": guards}


def _healthy(run_all: Map, size: Size) -> dict[str, Any]:
    healthy = list(run_all(experiments.healthy_immediate, [(seed, size.steps) for seed in range(size.runs)]))
    return {
        "healthy": {
            "false_alarm_rate": sum(found["rolled_back"] > 0 for found in healthy) / size.runs,
            "versions_rolled_back": sum(found["rolled_back"] for found in healthy),
            "steps": sum(found["steps"] for found in healthy),
            "runs": size.runs,
        }
    }


def _canaries(run_all: Map, size: Size) -> dict[str, Any]:
    canary = list(run_all(experiments.healthy_gated, [(seed, size.canaries) for seed in range(size.runs)]))
    refused, tried = (sum(found[name] for found in canary) for name in ("refused", "steps"))
    return {"healthy": {"canaries_refused": refused, "canaries": tried}}


def _detection(run_all: Map, size: Size) -> dict[str, Any]:
    detection: list[dict[str, Any]] = []
    for drop in _DROPS:
        found = list(run_all(experiments.poisoned_immediate, [(seed, drop) for seed in range(size.runs)]))
        detected = sorted(each["sessions"] for each in found if each["detected"])
        detection.append({"drop": drop, "detected": len(detected), "of": size.runs, "sessions": detected})
    return {"detection": sorted(detection, key=lambda each: float(each["drop"]))}


def _real_gated(_run_all: Map, size: Size) -> dict[str, Any]:
    """Learn here, and not among the processes: the run is a whole stack."""
    return {"real": {"gated": asyncio.run(real.gated(0, healthy=size.learnt, poisoned=size.poisoned))}}


def _real_immediate(_run_all: Map, size: Size) -> dict[str, Any]:
    # Without gates, versions follow each other faster: half of the sessions teach as much.
    found = asyncio.run(real.immediate(0, healthy=size.learnt // 2, most=2 * size.poisoned))
    return {"real": {"immediate": found}}


PARTS: dict[str, Part] = {
    "poisoned": _poisoned,
    "hacking": _hacking,
    "evaluation": _evaluation,
    "preference": _preference,
    "guards": _guards,
    "healthy": _healthy,
    "canaries": _canaries,
    "detection": _detection,
    "real-gated": _real_gated,
    "real-immediate": _real_immediate,
}
