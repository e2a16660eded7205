"""Kill proxy, trainer and two engines at random times under load, inject faults, and count broken promises.

`python -m benchmarks.chaos [--seconds 300] [--database sqlite|postgresql]` serves two adapter runs of the
calculator's model on two embedded engines that both runs share, with one trainer, and agents of both runs that call,
stream, reward, repeat and revise without a pause, under the same session names in both runs. Every few seconds one
randomly chosen part gets a kill -9, and the supervisor restarts it. Meanwhile faults take turns: relays before the
engines change their answers, a hostile client attacks, and the disk of the store is full. PostgreSQL grants the proxy
five connections all the time. A judge scores the sessions of one run, by a model that fails in a fifth of its
answers: the proxy runs its jobs on SQLite, and a worker on PostgreSQL, by Celery and Redis. After the last kill, the
wait of an agent is measured with and without the hostile client, the agents continue until everything trainable has
been trained and judged, and the store is compared with the answers that the agents received.
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
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx

from benchmarks.chaos.accounts import Ask, counted, impossible, trainable
from benchmarks.chaos.customers import Customers, Promises
from benchmarks.chaos.faults import FULL_DISK, HOSTILITY, LIES, Faults, attacks, child
from benchmarks.chaos.judging import WORKER, Judging, judgements, judging
from benchmarks.chaos.places import Place, place
from benchmarks.chaos.waiting import measure
from benchmarks.machine import describe
from proxy.cli.addresses import random_free_port
from proxy.cli.stack import ENGINE, PROXY, TRAINER, Stack, running_stack, wait_until_ready
from proxy.cli.supervisor import Part, Supervisor
from proxy.cli.up import with_model
from proxy.engines.launch import embedded_plan
from proxy.lifecycle.check import check
from proxy.settings import Settings, load_settings

RESULT = Path(__file__).parent.parent / "results" / "chaos.json"
EXAMPLE = Path(__file__).parents[2] / "agents_examples" / "calculator"
DATABASES = ("sqlite", "postgresql")
RUNS = ("calculator", "second")
ENGINES = (ENGINE, f"{ENGINE}-2")
PARTS = (PROXY, TRAINER, *ENGINES, WORKER)
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
    "unjudged",
    "judged_twice",
    "wrong_scores",
    "believed_lies",
    "crashes_by_hostile_requests",
    "stuck",
    "given_up",
)
"""Figures that must be 0: each counts broken promises."""

_LEAST_BETWEEN_S = 16.0
"""Seconds between two kills of one part: the supervisor gives up a part that dies five times within a minute."""
_DRAIN_S = 120.0
_SHORT_S = 30.0
_ROUNDS, _SHORT_ROUNDS = 4, 1
_CONNECTIONS = 100
"""Client connections that the proxy accepts: fewer than a hostile client opens."""
_ADDED_MS = 100.0
"""Milliseconds that a hostile client may add to the 99th percentile of another client's wait."""
_TRAINER = {
    "BASE_RL_TRAINER__RUNS": json.dumps({run: {} for run in RUNS}),
    "BASE_RL_TRAINER__BATCH__TRAJECTORIES": "32",
    "BASE_RL_TRAINER__BATCH__AT_LEAST": "2",
    "BASE_RL_TRAINER__BATCH__WAIT_SECONDS": "2",
    "BASE_RL_TRAINER__BATCH__MAX_STALENESS": "1000000",
}


class Killer:
    """Sends kill -9 to one part after another; the supervisor restarts them."""

    def __init__(self, supervisors: dict[str, Supervisor], seed: int, every: float) -> None:
        self.kills: Counter[str] = Counter()
        self._supervisors = supervisors
        self._random = random.Random(seed)
        self._every = every
        self._last = dict.fromkeys(PARTS, -_LEAST_BETWEEN_S)

    async def work(self, seconds: float) -> None:
        began = time.monotonic()
        while (left := seconds - (time.monotonic() - began)) > 0:
            await asyncio.sleep(min(left, self._random.expovariate(1 / self._every)))
            for supervisor in self._supervisors.values():
                supervisor.raise_for_failure()
            now = time.monotonic() - began
            due = [part for part in self._supervisors if now - self._last[part] >= _LEAST_BETWEEN_S]
            part = self._random.choice(due) if due else None
            if part is None or not self._supervisors[part].alive(part):
                continue
            pid = self._supervisors[part].pid(part)
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            self._last[part] = now
            self.kills[part] += 1


async def chaos(database: str, at: Place, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Run all kills and faults on one database, and return the figures."""
    began = time.monotonic()

    def listener(part: str, what: str) -> None:
        print(f"  {time.monotonic() - began:6.1f} s  {part}: {what}", flush=True)

    faults = Faults(at, folder / f"faults-{database}", options.seed)
    checkpoint = str(EXAMPLE / "checkpoint")
    ports = [random_free_port("127.0.0.1") for _ in ENGINES]
    plans = [embedded_plan(model=checkpoint, port=port, seed=options.seed) for port in ports]
    parts = [Part(name=name, argv=plan.argv, env=plan.env) for name, plan in zip(ENGINES, plans, strict=True)]
    data_dir = folder / f"data-{database}"
    switch = ("--switch", str(faults.switch(LIES)), "--told", str(faults.told), "--seed", str(options.seed))
    logs = folder / f"logs-{database}"
    # On SQLite no other process than the proxy may run jobs.
    with judging(folder, with_workers=database == "postgresql") as judge, ExitStack() as liars:
        async with Supervisor([*parts, judge.model], logs, listener) as engines:
            urls = []
            for port in ports:
                liar = liars.enter_context(child("liar", "--engine", str(port), *switch))
                assert liar.stdout is not None
                urls.append(f"http://127.0.0.1:{int(liar.stdout.readline())}")
            settings = _settings(at, data_dir, checkpoint, urls, judge)
            async with running_stack(
                settings, config_file=EXAMPLE / "config.toml", with_trainer=True, seed=options.seed, listener=listener
            ) as stack:
                await wait_until_ready(stack)  # the proxy has made the tables then, which a worker needs
                workers = judge.workers(settings, at.free_url, EXAMPLE / "config.toml")
                async with Supervisor(workers, logs, listener) as working:
                    supervisors = {PROXY: stack.supervisor, TRAINER: stack.supervisor}
                    supervisors |= dict.fromkeys(ENGINES, engines) | {part.name: working for part in workers}
                    killer = Killer(supervisors, options.seed, options.kill_every)
                    found = await _under_load(at, stack, faults, killer, options)
    findings = check(settings.database_url)
    for finding in findings:
        print(f"  base-rl db check: {finding}", flush=True)
    return {
        "database": database,
        "kills": {part: killer.kills[part] for part in supervisors},
        "faults": {kind: faults.made[kind] for kind in (LIES, HOSTILITY, FULL_DISK)},
        "lies": faults.lies(),
        **found,
        "believed_lies": impossible(at.ask, _vocabulary(checkpoint)),
        "damage": sum(finding.count for finding in findings),
        "seconds": round(time.monotonic() - began, 1),
    }


def _settings(at: Place, data_dir: Path, checkpoint: str, engine_urls: list[str], judge: Judging) -> Settings:
    overrides: dict[str, dict[str, Any]] = {
        "server": {"port": 0, "data_dir": data_dir, "max_connections": _CONNECTIONS},
        "engine": {"kind": engine_urls[0], "replica_urls": engine_urls[1:]},
        "run": {"model": checkpoint, "weights": "adapter", "lease_seconds": 4.0, "session_idle_seconds": 30.0},
        "runs": {run: judge.run_settings() if run == RUNS[1] else {} for run in RUNS},
        "database": {"url": at.url},
        **judge.settings(),
    }
    return with_model(load_settings(EXAMPLE / "config.toml", overrides), checkpoint)


def _vocabulary(checkpoint: str) -> int:
    size: int = json.loads((Path(checkpoint) / "config.json").read_bytes())["vocab_size"]
    return size


async def _under_load(
    at: Place, stack: Stack, faults: Faults, killer: Killer, options: argparse.Namespace
) -> dict[str, Any]:
    """Run kills and faults while agents work, then measure without kills, with and without a hostile client, and
    compare the store with the promises."""
    promises = Promises()
    keys = {RUNS[0]: stack.keys.run_key, RUNS[1]: await _new_key(stack, RUNS[1])}
    crowds = [
        Customers(stack.url, key, run, promises, seed=options.seed, count=options.agents // len(RUNS))
        for run, key in keys.items()
    ]
    waits = faults.folder / "waits"
    hostile_arguments = ("--model", RUNS[0], "--switch", str(faults.switch(HOSTILITY)), "--seed", str(options.seed))
    with child("hostile", stack.url, stack.keys.run_key, *hostile_arguments) as hostile:
        working = asyncio.ensure_future(asyncio.gather(*(customers.work() for customers in crowds)))
        try:
            breaking = asyncio.gather(killer.work(options.seconds), faults.work(options.seconds))
            await asyncio.wait((working, breaking), return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                working.result()
            await breaking
            await wait_until_ready(stack)
            with child("probe", stack.url, stack.keys.run_key, str(waits)):
                waited = await measure(faults, waits, _SHORT_ROUNDS if options.short else _ROUNDS)
            sent = attacks(hostile)
            stuck = await _drained(at.ask, stack)
        finally:
            for customers in crowds:
                customers.finish()
            await asyncio.wait((working,), timeout=120)
        working.result()
        judged = await judgements(at.ask, RUNS[1], patience=_DRAIN_S)
    return {
        **counted(at.ask, promises),
        **judged,
        "attacks": sent,
        "crashes_by_hostile_requests": sum(
            count for statuses in sent.values() for status, count in statuses.items() if "500" in status
        ),
        **waited,
        "stuck": stuck,
        "failed_requests": promises.failures,
        "given_up": promises.given_up,
    }


async def _new_key(stack: Stack, run: str) -> str:
    """Return a new key for a run's agents."""
    headers = {"authorization": f"Bearer {stack.keys.admin_key}"}
    async with httpx.AsyncClient(base_url=stack.url, headers=headers, timeout=30) as admin:
        answer = await admin.post("/api/v1/keys", json={"kind": "run", "run": run})
    answer.raise_for_status()
    return str(answer.json()["key"])


async def _drained(ask: Ask, stack: Stack) -> int:
    """Return how many of the sessions that are trainable now are still trainable after two minutes without kills."""
    await wait_until_ready(stack)
    waiting = trainable(ask)
    began = time.monotonic()
    while waiting and time.monotonic() - began < _DRAIN_S:
        await asyncio.sleep(1.0)
        stack.supervisor.raise_for_failure()
        waiting &= trainable(ask)
    return len(waiting)


def together(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Combine the figures of all runs: counts are added, and of waits the longest is taken."""
    total: dict[str, Any] = {"database": " and ".join(run["database"] for run in runs)}
    for name, first in runs[0].items():
        if name in ("kills", "faults", "lies"):
            total[name] = dict(sum((Counter(run[name]) for run in runs), Counter()))
        elif name.startswith("p99"):
            total[name] = max(run[name] for run in runs)
        elif not isinstance(first, str | dict):
            total[name] = round(sum(run[name] for run in runs), 1)
    return {"machine": describe(), **total, "runs": runs}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=300.0, help="of kills and faults, for each database")
    parser.add_argument("--kill-every", type=float, default=6.0, help="seconds, on average")
    parser.add_argument("--agents", type=int, default=24, help="at once, of both runs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--database", choices=DATABASES, action="append", help="default: both")
    parser.add_argument("--write", action=argparse.BooleanOptionalAction, default=True, help=f"to {RESULT.name}")
    parser.add_argument("--short", action="store_true", help="half a minute of kills; no wait is judged")
    options = parser.parse_args()
    if options.short:
        options.seconds, options.write = _SHORT_S, False
    os.environ.update(_TRAINER)
    folder = Path(tempfile.mkdtemp(prefix="base-rl-chaos-"))
    folder.chmod(0o755)  # PostgreSQL's user has its own below it
    runs = []
    try:
        for database in options.database or DATABASES:
            print(f"{database}: {options.seconds:.0f} s of kills and faults", flush=True)
            with place(database, folder) as at:
                if at.disk is None:
                    print("  no full disk: to mount one of its own needs root", flush=True)
                runs.append(asyncio.run(chaos(database, at, folder, options)))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    result = together(runs)
    if options.write:
        RESULT.write_text(json.dumps(result, indent=2) + "\n")
    for run in runs:
        print(json.dumps(run, indent=2))
    broken = {name: result[name] for name in BROKEN if result[name]}
    if not options.short and result["p99_ms_added"] > _ADDED_MS:
        broken["p99_ms_added"] = result["p99_ms_added"]
    print("every promise kept" if not broken else f"BROKEN: {broken}")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
