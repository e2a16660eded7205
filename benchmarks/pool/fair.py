"""One run with ten times its share beside another: `python -m benchmarks.pool.fair`, or `make bench-fair`.

Two adapter runs share one embedded engine that runs `RUNNING` requests at once. The agents of the run `quiet` keep as
many calls under way as its half of the engine runs, the agents of `crowd` ten times as many. The calls of `quiet` are
timed alone and beside `crowd`, in turns, so that other work on the machine hits both alike. Writes
`benchmarks/results/fair.json`; the exit status is 0 if the targets were reached. `--short` makes one round and writes
nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.machine import describe
from benchmarks.pool.installation import CHECKPOINT, END_TOKEN, HOST, Installation, installed, quoted
from benchmarks.proxy.conversations import post
from benchmarks.proxy.load import Connection, Failed
from benchmarks.proxy.measures import quantile
from benchmarks.targets import Target, target_rows
from proxy.cli.addresses import random_free_port
from proxy.cli.supervisor import Part
from proxy.engines.launch import embedded_plan

RESULT = Path(__file__).parents[1] / "results" / "fair.json"
RUNNING = 8
QUIET_CLIENTS = RUNNING // 2
CROWD_CLIENTS = 10 * QUIET_CLIENTS
LENGTHS = (16, 32, 48, 64)
"""Tokens of an answer, drawn for each call. The end token is forbidden, so that they are exact."""
ROUND_S = 10.0
ROUNDS = 6
WARM_S = 3.0
RATIO = 2.0


def requests(key: str, run: str, seed: int) -> Iterator[bytes]:
    """Yield a client's calls, each a conversation of its own."""
    chance = random.Random(seed)
    for number in itertools.count():
        body = {
            "model": run,
            "messages": [{"role": "user", "content": f"Task {seed}-{number}: what is {chance.randrange(99)} + 7?"}],
            "max_tokens": chance.choice(LENGTHS),
            "logit_bias": {END_TOKEN: -100},
        }
        yield post("/v1/chat/completions", json.dumps(body).encode(), f"authorization: Bearer {key}\r\n")


class Crowd:
    """Clients that call one after another until `stop`. `seconds` are those of every call."""

    def __init__(self, port: int, clients: list[Iterator[bytes]]) -> None:
        self.seconds: list[float] = []
        self.failed: list[str] = []
        self._over = False
        self._tasks = [asyncio.create_task(self._call(port, client)) for client in clients]

    async def stop(self) -> None:
        """Let every client finish its call."""
        self._over = True
        await asyncio.gather(*self._tasks)

    async def _call(self, port: int, client: Iterator[bytes]) -> None:
        connection = await Connection.open(port)
        while not self._over:
            began = time.perf_counter()
            try:
                await connection.call(next(client), stream=False)
            except Failed as error:
                self.failed.append(str(error))
                connection = await Connection.open(port)
            else:
                self.seconds.append(time.perf_counter() - began)
        connection.close()


async def measure(installation: Installation, rounds: int, seconds: float) -> dict[str, Any]:
    keys = {run: await installation.key_of(run) for run in ("quiet", "crowd")}
    seeds = itertools.count()

    def clients(run: str, count: int) -> list[Iterator[bytes]]:
        return [requests(keys[run], run, next(seeds)) for _ in range(count)]

    async def quiet() -> Crowd:
        crowd = Crowd(installation.port, clients("quiet", QUIET_CLIENTS))
        await asyncio.sleep(seconds)
        await crowd.stop()
        return crowd

    alone: list[float] = []
    beside: list[float] = []
    crowded: list[float] = []
    failed: list[str] = []
    for number in range(rounds + 1):
        first = await quiet()
        crowd = Crowd(installation.port, clients("crowd", CROWD_CLIENTS))
        await asyncio.sleep(WARM_S)
        since = len(crowd.seconds)
        second = await quiet()
        during = crowd.seconds[since:]
        await crowd.stop()
        failed += [*first.failed, *second.failed, *crowd.failed]
        if number == 0:
            continue  # caches are cold
        alone += first.seconds
        beside += second.seconds
        crowded += during
        print(f"  round {number}: quiet p99 {quantile(first.seconds, 0.99) * 1000:.0f} ms alone,", end=" ")
        print(f"{quantile(second.seconds, 0.99) * 1000:.0f} ms beside the crowd", flush=True)
    if failed:
        print(f"  {len(failed)} calls failed, the first one: {failed[0]}")
    milliseconds = {
        f"{name}_{share}": quantile(values, level) * 1000
        for name, values in (("alone", alone), ("beside", beside), ("crowd", crowded))
        for share, level in (("p50", 0.5), ("p99", 0.99))
    }
    return {
        "engine_runs_at_once": RUNNING,
        "quiet_clients": QUIET_CLIENTS,
        "crowd_clients": CROWD_CLIENTS,
        **{name: round(value, 1) for name, value in milliseconds.items()},
        "p99_ratio": round(milliseconds["beside_p99"] / milliseconds["alone_p99"], 2),
        "share_of_calls_beside": round(len(beside) / (len(beside) + len(crowded)), 2),
        "calls": len(alone) + len(beside) + len(crowded),
        "failed": len(failed),
    }


def judged(result: dict[str, Any]) -> list[Target]:
    return [
        Target(what="p99 beside ten times the share, over p99 alone", measured=result["p99_ratio"], bound=RATIO),
        Target(what="calls that failed", measured=result["failed"], bound=0),
    ]


async def run(folder: Path, rounds: int, seconds: float) -> dict[str, Any]:
    port = random_free_port(HOST)
    plan = embedded_plan(model=str(CHECKPOINT), port=port)
    engine = Part(name="engine", argv=(*plan.argv, "--max-running", str(RUNNING)), env=plan.env)
    config = f'[run]\nmodel = {quoted(CHECKPOINT)}\nweights = "adapter"\n\n[runs.quiet]\n\n[runs.crowd]\n'
    async with installed(folder, [engine], [plan.url], config) as installation:
        return await measure(installation, rounds, seconds)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="one round; nothing is judged or written")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="base-rl-fair-"))
    try:
        rounds, seconds = (1, 3.0) if options.short else (ROUNDS, ROUND_S)
        result = {"machine": describe(), **uvloop.run(run(folder / "run", rounds, seconds))}
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(json.dumps(result, indent=2))
    targets = judged(result)
    for what, bound, measured in target_rows(targets):
        print(f"{what}: {measured} ({bound})")
    if options.short:
        return 1 if result["failed"] else 0
    RESULT.write_text(json.dumps(result, indent=2) + "\n")
    return 0 if all(target.reached for target in targets) else 1


if __name__ == "__main__":
    sys.exit(main())
