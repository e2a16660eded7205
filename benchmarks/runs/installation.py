"""One real installation, with one engine, one proxy and one trainer of all its runs, and the memory that it takes."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from proxy.cli.operations import Operations
from proxy.cli.stack import ENGINE, PROXY, Stack, running_stack, trainer_environment, wait_until_ready
from proxy.cli.supervisor import Part, Supervisor
from proxy.settings import load_settings

CHECKPOINT = Path(__file__).parents[2] / "agents_examples" / "calculator" / "checkpoint"
TRAINER = "trainer"
_SAMPLE_SECONDS = 0.5
_BEGUN_SECONDS = 120.0

# Adapters start from zero and need a higher rate than whole weights: the calculator's own is for whole weights.
_LEARNING_RATE = {"adapter": 1e-3, "full": 1.2e-4}

_CONFIGURATION = """\
[run]
model = "{model}"
weights = "{weights}"
max_new_tokens = 64
session_idle_seconds = 120
group_timeout_seconds = 20

[engine]
kind = "{engine}"

[trainer]
threads = 1

[trainer.batch]
trajectories = 64
at_least = 32
wait_seconds = 20
max_staleness = 4

[trainer.algorithm]
preset = "grpo"

[trainer.optimizer]
learning_rate = {learning_rate}
"""


@dataclass(kw_only=True)
class Installation:
    """A running installation. `memory_mib` is the most resident memory of engine and trainer together so far."""

    stack: Stack
    operations: Operations
    trainer: Supervisor
    started_at: float
    memory_mib: float = 0.0
    parts_mib: dict[str, float] = field(default_factory=dict)

    async def key_of(self, run: str) -> str:
        made = await self.operations.create_key({"kind": "run", "run": run})
        key: str = made["key"]
        return key

    def cpu_seconds(self) -> dict[str, float]:
        """Return the CPU time so far of every part, and of this process with its agents."""
        pids = {
            **{part: self.stack.supervisor.pid(part) for part in (ENGINE, PROXY)},
            TRAINER: self.trainer.pid(TRAINER),
        }
        found = {part: cpu_seconds(pid) for part, pid in pids.items() if pid is not None}
        own = psutil.Process().cpu_times()
        return {**found, "agents": own.user + own.system}

    async def watch_memory(self) -> None:
        """Sample the memory until cancelled."""
        while True:
            pids = {ENGINE: self.stack.supervisor.pid(ENGINE), TRAINER: self.trainer.pid(TRAINER)}
            found = {name: resident_mib(pid) for name, pid in pids.items() if pid is not None}
            if sum(found.values()) > self.memory_mib:
                self.memory_mib, self.parts_mib = sum(found.values()), found
            await asyncio.sleep(_SAMPLE_SECONDS)


@asynccontextmanager
async def installed(
    runs: Sequence[str], *, weights: str, engine: str, data_dir: Path, seed: int
) -> AsyncIterator[Installation]:
    """Start an installation whose runs are served by one engine and trained by one trainer (`--runs all`).

    Raises PartFailed, and TimeoutError if a run is not served in time.
    """
    started_at = time.monotonic()
    data_dir.mkdir(parents=True, exist_ok=True)
    config = data_dir / "runs.toml"
    config.write_text(configuration(runs, weights=weights, engine=engine))
    settings = load_settings(config, {"server": {"port": 0, "data_dir": data_dir}})
    async with running_stack(
        settings, config_file=config, with_trainer=False, seed=seed, listener=_print_event
    ) as stack:
        part = Part(
            name=TRAINER,
            argv=(sys.executable, "-m", "trainer", "--config", str(config), "--runs", "all"),
            env={
                **trainer_environment(settings, url=stack.url, seed=seed),
                "BASE_RL_TRAINER__API_KEY": stack.keys.trainer_key,
            },
        )
        async with (
            Supervisor([part], data_dir / "logs", _print_event) as trainer,
            Operations(stack.url, stack.keys.admin_key) as operations,
        ):
            await wait_until_ready(stack)
            installation = Installation(stack=stack, operations=operations, trainer=trainer, started_at=started_at)
            await _wait_until_trained(operations, runs)
            watching = asyncio.create_task(installation.watch_memory())
            try:
                yield installation
            finally:
                watching.cancel()


def configuration(runs: Sequence[str], *, weights: str, engine: str) -> str:
    """Return the configuration file of proxy and trainer."""
    shared = _CONFIGURATION.format(
        model=CHECKPOINT, weights=weights, engine=engine, learning_rate=_LEARNING_RATE[weights]
    )
    return shared + "".join(f"\n[runs.{run}]\n" for run in runs)


def resident_mib(pid: int) -> float:
    """Return the resident memory of a process and its children in MiB; 0 for one that has ended."""
    return _sum_over_tree(pid, lambda process: process.memory_info().rss) / 2**20


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process and its children; 0 for one that has ended."""

    def seconds(process: psutil.Process) -> float:
        times = process.cpu_times()
        return float(times.user + times.system)

    return _sum_over_tree(pid, seconds)


def _sum_over_tree(pid: int, figure: Callable[[psutil.Process], float]) -> float:
    try:
        process = psutil.Process(pid)
        processes = [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return 0.0
    total = 0.0
    for each in processes:
        try:
            total += figure(each)
        except psutil.NoSuchProcess:
            continue  # it ended since the list was made
    return total


async def _wait_until_trained(operations: Operations, runs: Sequence[str]) -> None:
    """Wait until the trainer has asked for a batch of every run. Raises TimeoutError."""
    async with asyncio.timeout(_BEGUN_SECONDS):
        while True:
            health = {run["name"]: run for run in (await operations.health())["runs"]}
            if all(run in health and health[run]["trainer"] != "never" for run in runs):
                return
            await asyncio.sleep(0.2)


def _print_event(part: str, event: str) -> None:
    print(f"  {part}: {event}", flush=True)
