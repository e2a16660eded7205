"""Kills proxy, trainer and engine at random times under load, and counts what is missing afterwards.

`python -m benchmarks.chaos [--seconds 300] [--database sqlite|postgresql]`: the calculator's model on the embedded
engine, its trainer, and agents that call, stream, reward, repeat and revise without a pause, far more than an agent
of flesh and network would. Every few seconds one part, drawn at random, gets a kill -9; the supervisor starts it
again. Then the kills end, the agents go on until all that was trainable has been trained, and the store is compared
with what the agents were told.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.chaos.accounts import Ask, asking_postgresql, asking_sqlite, counted, trainable
from benchmarks.chaos.customers import Customers
from benchmarks.machine import describe
from benchmarks.postgresql import DURABLE, PostgresServer
from proxy.cli.stack import ENGINE, PROXY, TRAINER, Stack, running_stack, wait_until_ready
from proxy.cli.up import with_model
from proxy.database.check import check
from proxy.settings import load_settings

RESULT = Path(__file__).parent.parent / "results" / "chaos.json"
EXAMPLE = Path(__file__).parents[2] / "agents_examples" / "calculator"
DATABASES = ("sqlite", "postgresql")
PARTS = (PROXY, TRAINER, ENGINE)
BROKEN = (
    "lost_turns",
    "changed_turns",
    "lost_rewards",
    "changed_rewards",
    "doubled_rewards",
    "consumed_twice",
    "consumed_without_a_step",
    "trained_and_not_consumed",
    "missing_versions",
    "sessions_with_miscounted_turns",
    "ambiguous_answers",
    "damage",
    "stuck",
    "given_up",
)
"""Every one of them has to be 0."""

_LEAST_BETWEEN_S = 16.0
"""Two kills of one part: one that dies five times within a minute is given up."""
_DRAIN_S = 120.0
_SHORT_S = 30.0
_TRAINER = {
    "BASE_RL_TRAINER__BATCH__TRAJECTORIES": "32",
    "BASE_RL_TRAINER__BATCH__AT_LEAST": "2",
    "BASE_RL_TRAINER__BATCH__WAIT_SECONDS": "2",
    "BASE_RL_TRAINER__BATCH__MAX_STALENESS": "1000000",
}


class Killer:
    """kill -9, and nothing else: the supervisor starts the part again."""

    def __init__(self, stack: Stack, seed: int, every: float) -> None:
        self.kills: Counter[str] = Counter()
        self._stack = stack
        self._random = random.Random(seed)
        self._every = every
        self._last = dict.fromkeys(PARTS, -_LEAST_BETWEEN_S)

    async def work(self, seconds: float) -> None:
        began = time.monotonic()
        while (left := seconds - (time.monotonic() - began)) > 0:
            await asyncio.sleep(min(left, self._random.expovariate(1 / self._every)))
            self._stack.supervisor.raise_for_failure()
            now = time.monotonic() - began
            due = [part for part in PARTS if now - self._last[part] >= _LEAST_BETWEEN_S]
            part = self._random.choice(due) if due else None
            if part is None or not self._stack.supervisor.alive(part):
                continue
            pid = self._stack.supervisor.pid(part)
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            self._last[part] = now
            self.kills[part] += 1


async def chaos(database: str, url: str | None, data_dir: Path, options: argparse.Namespace) -> dict[str, Any]:
    overrides: dict[str, dict[str, Any]] = {
        "server": {"port": 0, "data_dir": data_dir},
        "run": {"lease_seconds": 4.0, "session_idle_seconds": 30.0},
        "database": {} if url is None else {"url": url},
    }
    settings = with_model(load_settings(EXAMPLE / "config.toml", overrides), str(EXAMPLE / "checkpoint"))
    ask = asking_sqlite(data_dir / "base-rl.sqlite3") if url is None else asking_postgresql(url)
    began = time.monotonic()
    async with running_stack(
        settings,
        config_file=EXAMPLE / "config.toml",
        with_trainer=True,
        seed=options.seed,
        listener=lambda part, what: print(f"  {time.monotonic() - began:6.1f} s  {part}: {what}", flush=True),
    ) as stack:
        await wait_until_ready(stack)
        customers = Customers(stack.url, stack.keys.run_key, options.seed, options.agents)
        working = asyncio.create_task(customers.work())
        killer = Killer(stack, options.seed, options.kill_every)
        try:
            killing = asyncio.create_task(killer.work(options.seconds))
            await asyncio.wait((working, killing), return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                working.result()
            await killing
            stuck = await _drained(ask, stack)
        finally:
            customers.finish()
            await asyncio.wait((working,), timeout=120)
        working.result()
        found = counted(ask, customers.promises)
    findings = check(settings.database_url)
    for finding in findings:
        print(f"  base-rl db check: {finding}", flush=True)
    return {
        "database": database,
        "kills": {part: killer.kills[part] for part in PARTS},
        **found,
        "damage": sum(finding.count for finding in findings),
        "stuck": stuck,
        "failed_requests": customers.promises.failures,
        "given_up": customers.promises.given_up,
        "seconds": round(time.monotonic() - began, 1),
    }


async def _drained(ask: Ask, stack: Stack) -> int:
    """How much of what is trainable now is so still after two minutes in which nothing was killed."""
    await wait_until_ready(stack)
    waiting = trainable(ask)
    began = time.monotonic()
    while waiting and time.monotonic() - began < _DRAIN_S:
        await asyncio.sleep(1.0)
        stack.supervisor.raise_for_failure()
        waiting &= trainable(ask)
    return len(waiting)


@contextmanager
def _place(database: str, folder: Path) -> Iterator[str | None]:
    """The URL of a new database; None for the file in the data directory."""
    if database == "sqlite":
        yield None
        return
    server = PostgresServer(DURABLE, folder)
    server.start()
    try:
        server.make_database("chaos")
        yield server.url("chaos")
    finally:
        server.remove()


def together(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """One account of all runs, and each by itself."""
    total: dict[str, Any] = {"database": " and ".join(run["database"] for run in runs)}
    total["kills"] = {part: sum(run["kills"][part] for run in runs) for part in PARTS}
    for name in runs[0]:
        if name not in total:
            total[name] = round(sum(run[name] for run in runs), 1)
    return {"machine": describe(), **total, "runs": runs}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=300.0, help="of kills, for each database")
    parser.add_argument("--kill-every", type=float, default=6.0, help="seconds, on average")
    parser.add_argument("--agents", type=int, default=24, help="at once")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--database", choices=DATABASES, action="append", help="default: both")
    parser.add_argument("--write", action=argparse.BooleanOptionalAction, default=True, help=f"to {RESULT.name}")
    parser.add_argument("--short", action="store_true", help="half a minute of kills, and nothing is written")
    options = parser.parse_args()
    if options.short:
        options.seconds, options.write = _SHORT_S, False
    os.environ.update(_TRAINER)
    folder = Path(tempfile.mkdtemp(prefix="base-rl-chaos-"))
    folder.chmod(0o755)  # PostgreSQL's user has its own below it
    runs = []
    try:
        for database in options.database or DATABASES:
            print(f"{database}: {options.seconds:.0f} s of kills", flush=True)
            with _place(database, folder) as url:
                runs.append(asyncio.run(chaos(database, url, folder / f"data-{database}", options)))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    result = together(runs)
    if options.write:
        RESULT.write_text(json.dumps(result, indent=2) + "\n")
    for run in runs:
        print(json.dumps(run, indent=2))
    broken = {name: result[name] for name in BROKEN if result[name]}
    print("every promise kept" if not broken else f"BROKEN: {broken}")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
