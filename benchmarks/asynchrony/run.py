"""One real installation, on which agents work in one of two ways."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.asynchrony.agents import MODEL, Agents
from proxy.cli.operations import Operations
from proxy.cli.stack import running_stack, wait_until_ready
from proxy.cli.up import with_model
from proxy.settings import load_settings

EXAMPLE = Path(__file__).parents[2] / "agents_examples" / "calculator"
GOAL = 0.9
STALEST = 8
"""Largest staleness in versions of the asynchronous way; a long attempt spans several swaps."""
_PATIENCE_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Work:
    """The work of one way: `batches` of 64 sessions, whose tools take log-normal times with this `median` and
    `sigma`."""

    seed: int
    batches: int
    median: float
    sigma: float


async def measure(work: Work, *, asynchronous: bool, data_dir: Path) -> dict[str, Any]:
    """Run the sessions, synchronously or not, and return the figures. Seconds are counted from the first session."""
    settings = load_settings(EXAMPLE / "config.toml", {"server": {"port": 0, "data_dir": data_dir}})
    with _told(BASE_RL_TRAINER__BATCH__MAX_STALENESS=STALEST if asynchronous else 0):
        async with running_stack(
            with_model(settings, str(EXAMPLE / "checkpoint")),
            config_file=EXAMPLE / "config.toml",
            with_trainer=True,
            seed=work.seed,
            listener=lambda part, what: print(f"  {part}: {what}", flush=True),
        ) as stack:
            await wait_until_ready(stack)
            agents = Agents(stack.url, stack.keys.run_key, seed=work.seed, median=work.median, sigma=work.sigma)
            async with Operations(stack.url, stack.keys.admin_key) as operations:
                if asynchronous:
                    await agents.stream(work.batches, GOAL)
                else:
                    await agents.batches(work.batches, GOAL, _Learnt(operations))
                found = {
                    "seconds": round(agents.seconds, 1),
                    "seconds_to_090": agents.seconds_to.get(GOAL),
                    "sessions": agents.sessions,
                    "trajectories_per_second": round(agents.sessions / agents.seconds, 2),
                    "final": round(agents.reward, 4),
                    **step_figures(await operations.steps(MODEL, 200)),
                }
            await agents.aclose()
    return found


class _Learnt:
    """Waits until a version that learnt from the batch is served. A batch without a signal makes no version: then it
    waits as long as a step may take."""

    def __init__(self, operations: Operations) -> None:
        self._operations = operations
        self._version = 0

    async def __call__(self) -> None:
        deadline = time.monotonic() + _PATIENCE_S
        while (await self._operations.run(MODEL))["serving_version"] == self._version:
            if time.monotonic() > deadline:
                return
            await asyncio.sleep(0.05)
        self._version = (await self._operations.run(MODEL))["serving_version"]


def step_figures(steps: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return idle ratios, weighted by the length of each step."""
    metrics = [step["metrics"] for step in steps if "trainer_idle_ratio" in step["metrics"]]
    lengths = [sum(value for name, value in each.items() if name.startswith("seconds_")) for each in metrics]

    def mean(name: str) -> float | None:
        known = [(each[name], length) for each, length in zip(metrics, lengths, strict=True) if name in each]
        total = sum(length for _, length in known)
        return round(sum(value * length for value, length in known) / total, 4) if total else None

    return {
        "versions": len(metrics),
        "trainer_idle_ratio": mean("trainer_idle_ratio"),
        "engine_idle_ratio": mean("engine_idle_ratio"),
        "staleness_max": max((each["staleness_max"] for each in metrics), default=None),
        "skipped_stale": sum(each["skipped_stale"] for each in metrics),
    }


@contextmanager
def _told(**variables: object) -> Iterator[None]:
    """Set environment variables for the processes that are started inside the block."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update({name: str(value) for name, value in variables.items()})
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
