"""The experiments of `make bench-gate`, each one run of many."""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from benchmarks.gates.faults import Habits
from benchmarks.gates.site import Site
from proxy.contract.policy import VersionState
from proxy.gates.pair_findings import PairSample, preference_finding
from proxy.settings import ReleaseSettings

SESSIONS_PER_STEP = 32
_BEFORE = 0.8
_WARM_STEPS = 16
_MOST_SESSIONS = 640
# Healthy steps neither gain nor lose on average; a bad step loses at once what its drop says.
_NOISE = 0.01

# These drawn sessions have no calls, so there is nothing to guard.
_NO_GUARDS = {"failed_calls": None, "broken_tool_calls": None, "cut_answers": None}
IMMEDIATE = {"policy": "immediate", "rollback": {"max_drop": 0.1}, "guards": _NO_GUARDS}
GATED = {
    "policy": "gated",
    "train_from": "passed",
    "canary": {"share": 0.1, "sessions": 60, "max_drop": 0.1},
    "guards": _NO_GUARDS,
}
GUARDED = {**GATED, "guards": {"answer_length": 0.2}}
_SUITE = "held-out"
_TASKS = 100
HACKING = {"policy": "gated", "train_from": "passed", "evaluation": {"suite": _SUITE, "tasks": _TASKS}}
PREFERRED = {"policy": "gated", "shadow": {"share": 0.1}, "preference": {"judge": "judge"}}
EVALUATED = {"policy": "gated", "train_from": "passed", "evaluation": {"suite": _SUITE}}
EVALUATION_TASKS = ReleaseSettings.model_validate(EVALUATED).evaluation.tasks
"""Those of a gate whose user sets nothing but the suite."""
LIVE_SESSIONS = 128
"""Sessions from one version to the next: those that a step trains by default (`trainer.batch.trajectories`)."""


def poisoned_immediate(arguments: tuple[int, float]) -> dict[str, Any]:
    """Poison the steps after a few healthy ones until the run is rolled back: the first loses `drop`, each of the
    others a tenth of it. Count the sessions that bad versions answered."""
    seed, drop = arguments

    async def course(site: Site) -> dict[str, Any]:
        await _healthy(site, _WARM_STEPS)
        good = await site.serving()
        bad: set[int] = set()
        sessions = 0
        while sessions < _MOST_SESSIONS:
            if (await site.serving()) <= good and bad:
                break
            bad.add(await site.step(-drop if not bad else -drop / 10))
            await site.look()
            for _ in range(SESSIONS_PER_STEP // 8):
                if bad and all([await site.state(version) == VersionState.ROLLED_BACK for version in bad]):
                    break
                await site.sessions(8)
                sessions = sum(site.answered[version] for version in bad)
        serving = await site.serving()
        return {
            "detected": serving <= good,
            "recovered": site.means[serving] >= site.means[good] - 0.02,
            "sessions": sum(site.answered[version] for version in bad),
        }

    return _run(course, IMMEDIATE, seed=seed, mean=_BEFORE)


def poisoned_gated(seed: int) -> dict[str, Any]:
    """Let a canary of a tenth try a poisoned version."""

    async def course(site: Site) -> dict[str, Any]:
        await site.sessions(SESSIONS_PER_STEP)
        bad = await site.step(-0.4)
        while await site.state(bad) in (VersionState.CANDIDATE, VersionState.CANARY):
            await site.sessions(8)
        await site.sessions(2 * SESSIONS_PER_STEP)
        return {
            "served_beyond_canary": site.beyond_trial[bad],
            "sessions": site.answered[bad],
            "recovered": await site.serving() == 0,
            "curve": (await site.finding(bad, "canary"))["curve"] if seed == 0 else None,
        }

    return _run(course, GATED, seed=seed, mean=_BEFORE)


def healthy_immediate(arguments: tuple[int, int]) -> dict[str, Any]:
    """Make healthy steps and count rollbacks."""
    seed, steps = arguments

    async def course(site: Site) -> dict[str, Any]:
        await _healthy(site, steps)
        taken_back = [
            version for version in site.means if version and await site.state(version) == VersionState.ROLLED_BACK
        ]
        return {"rolled_back": len(taken_back), "steps": steps}

    return _run(course, IMMEDIATE, seed=seed, mean=0.6)


def healthy_gated(arguments: tuple[int, int]) -> dict[str, Any]:
    """Let canaries of one half try equally good versions, and count refusals."""
    seed, steps = arguments
    release = {**GATED, "canary": {"share": 0.5, "sessions": 60, "max_drop": 0.1}}

    async def course(site: Site) -> dict[str, Any]:
        refused = 0
        for _ in range(steps):
            version = await site.step(0.0)
            while await site.state(version) in (VersionState.CANDIDATE, VersionState.CANARY):
                await site.sessions(16)
            refused += await site.state(version) == VersionState.REJECTED
        return {"refused": refused, "steps": steps}

    return _run(course, release, seed=seed, mean=0.6)


def hacking(seed: int) -> dict[str, Any]:
    """Let the live reward rise with each step while the mean on held-out tasks falls by 0.1 each time."""

    async def course(site: Site) -> dict[str, Any]:
        true_means = {0: 0.8}
        await site.evaluate(0, 0.8, _TASKS, _SUITE)
        for number in range(1, 6):
            version = await site.step(0.03)
            true_means[version] = 0.8 - 0.1 * number
            await site.evaluate(version, true_means[version], _TASKS, _SUITE)
            await site.sessions(SESSIONS_PER_STEP)
            if await site.state(version) == VersionState.REJECTED:
                break
        serving = await site.serving()
        return {
            "stopped": await site.state(version) == VersionState.REJECTED,
            "held_out_lost": round(0.8 - true_means[serving], 3),
            "evaluated": site.evaluated,
            "sessions": sum(site.answered.values()),
        }

    return _run(course, HACKING, seed=seed, mean=0.5)


def evaluated(arguments: tuple[int, int]) -> dict[str, Any]:
    """Evaluate each of some equally good versions by the gate's default size, and count the sessions that this takes
    beside the live ones. Version 0 is evaluated too."""
    seed, steps = arguments

    async def course(site: Site) -> dict[str, Any]:
        await site.evaluate(0, _BEFORE, EVALUATION_TASKS, _SUITE)
        refused = 0
        for _ in range(steps):
            version = await site.step(0.0)
            await site.evaluate(version, _BEFORE, EVALUATION_TASKS, _SUITE)
            await site.sessions(LIVE_SESSIONS)
            refused += await site.state(version) == VersionState.REJECTED
        return {"evaluated": site.evaluated, "sessions": sum(site.answered.values()), "refused": refused}

    return _run(course, EVALUATED, seed=seed, mean=_BEFORE)


def preferred(arguments: tuple[int, float]) -> dict[str, Any]:
    """Let a judge prefer a candidate's answer with the probability `share`, and look at the gate `preference`, with
    its default settings, after each pair until it decides."""
    seed, share = arguments
    rng = random.Random(seed)
    release = ReleaseSettings.model_validate(PREFERRED)
    preferences: tuple[float, ...] = ()
    while True:
        preferences += (float(rng.random() < share),)
        found = preference_finding(release, PairSample(against=0, preferences=preferences))
        if found.state != "waiting":
            # Those without a clear answer pass by `undecided`.
            return {"refused": found.state == "failed", "pairs": len(preferences)}


def guarded(seed: int) -> dict[str, Any]:
    """Let a canary of a tenth try a version with the same reward that breaks most tool calls, or makes answers longer
    (every second seed)."""
    fault = Habits(broken_tool_calls=0.6) if seed % 2 == 0 else Habits(tokens=192)

    async def course(site: Site) -> dict[str, Any]:
        site.usual_habits = Habits(broken_tool_calls=0.02)
        await site.sessions(SESSIONS_PER_STEP)
        bad = await site.step(0.0)
        site.habits[bad] = fault
        while await site.state(bad) in (VersionState.CANDIDATE, VersionState.CANARY):
            await site.sessions(8)
        guards = await site.finding(bad, "guards")
        failed = [name for name, found in guards["guards"].items() if (found.get("low") or 0.0) > found["bound"]]
        is_stopped = await site.state(bad) == VersionState.REJECTED
        return {"stopped": is_stopped and bool(failed), "sessions": site.answered[bad], "guards": failed}

    return _run(course, GUARDED, seed=seed, mean=0.6)


async def _healthy(site: Site, steps: int) -> None:
    for _ in range(steps):
        await site.step(site.rng.gauss(0.0, _NOISE))
        await site.look()
        await site.sessions(SESSIONS_PER_STEP)


def _run(
    course: Callable[[Site], Awaitable[dict[str, Any]]], release: dict[str, Any], *, seed: int, mean: float
) -> dict[str, Any]:
    async def run(directory: Path) -> dict[str, Any]:
        async with Site(directory, release, seed=seed, mean=mean) as site:
            return await course(site)

    with tempfile.TemporaryDirectory(prefix="bench-gate-") as name:
        return asyncio.run(run(Path(name).resolve()))
