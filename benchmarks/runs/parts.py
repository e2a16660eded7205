"""The parts of the measurement: each is one installation with one or several runs, measured from start to end."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.asynchrony.run import step_figures
from benchmarks.runs.agents import RunAgents
from benchmarks.runs.installation import Installation, installed

_PROGRESS_SECONDS = 10.0
_MOST_STEPS = 200


@dataclass(frozen=True, kw_only=True)
class Part:
    """An installation to measure. `runs` work at the same time, `weights` is their kind."""

    engine: str
    runs: tuple[str, ...]
    weights: str

    @property
    def name(self) -> str:
        what = self.runs[0] if len(self.runs) == 1 else f"{len(self.runs)} runs"
        return f"{self.engine}, {self.weights}, {what}"


@dataclass(frozen=True, kw_only=True)
class Effort:
    """The work of every run: `sessions` for training, at most `concurrency` at a time, then `evaluated` sessions."""

    sessions: int
    evaluated: int
    concurrency: int = 64


def parts_of(engine: str, runs: Sequence[str]) -> list[Part]:
    """Return all parts for an engine: the runs together, each one alone, and each one alone with whole weights."""
    return [
        Part(engine=engine, runs=tuple(runs), weights="adapter"),
        *(Part(engine=engine, runs=(run,), weights=weights) for run in runs for weights in ("adapter", "full")),
    ]


async def measure(part: Part, effort: Effort, seed: int) -> dict[str, Any]:
    """Run a part and return its figures. `seconds` is the time of the sessions for training, `wall` the time from the
    start of the first process to the end of these sessions."""
    with tempfile.TemporaryDirectory(prefix="base-rl-runs-") as directory:
        async with installed(
            part.runs, weights=part.weights, engine=part.engine, data_dir=Path(directory), seed=seed
        ) as installation:
            agents = [
                RunAgents(
                    installation.stack.url,
                    await installation.key_of(run),
                    run,
                    seed=seed + number,
                    concurrency=effort.concurrency,
                )
                for number, run in enumerate(part.runs)
            ]
            showing = asyncio.create_task(_show_progress(agents))
            cpu_before = installation.cpu_seconds()
            await asyncio.gather(*(each.train(effort.sessions) for each in agents))
            wall = time.monotonic() - installation.started_at
            showing.cancel()
            times = _times(agents)
            cpu = installation.cpu_seconds()
            evaluated = await asyncio.gather(*(each.evaluate(effort.evaluated) for each in agents))
            found = {
                **times,
                "wall": round(wall, 1),
                "cpu_ms_per_trajectory": {
                    name: round(1000 * (seconds - cpu_before[name]) / times["sessions"], 2)
                    for name, seconds in cpu.items()
                },
                "memory_mib": round(installation.memory_mib, 1),
                "parts_mib": {name: round(mib, 1) for name, mib in installation.parts_mib.items()},
                "failed": sum(each.failed for each in agents),
                "restarts": _restarts(installation),
                "rewards": dict(zip(part.runs, evaluated, strict=True)),
                "runs": {
                    each.name: step_figures(await installation.operations.steps(each.name, _MOST_STEPS))
                    for each in agents
                },
            }
            for each in agents:
                await each.aclose()
    return found


def _times(agents: Sequence[RunAgents]) -> dict[str, Any]:
    began = min(each.first_at for each in agents if each.first_at is not None)
    seconds = max(each.last_at for each in agents) - began
    trained = sum(each.sessions for each in agents)
    return {
        "seconds": round(seconds, 2),
        "sessions": trained,
        "trajectories_per_s": round(trained / seconds, 2),
        "seconds_by_run": {each.name: round(each.last_at - began, 1) for each in agents},
    }


def _restarts(installation: Installation) -> int:
    supervisors = (installation.stack.supervisor, installation.trainer)
    return sum(supervisor.restarts(part) for supervisor in supervisors for part in supervisor.parts)


async def _show_progress(agents: Sequence[RunAgents]) -> None:
    began = time.monotonic()
    while True:
        await asyncio.sleep(_PROGRESS_SECONDS)
        line = ", ".join(f"{each.name} {each.sessions} ({each.reward:.2f})" for each in agents)
        print(f"  {time.monotonic() - began:.0f} s: {line}", flush=True)
