"""Agents' calls with and without shadow answers: `python -m benchmarks.ungrouped.latency [--rounds N]`.

A real proxy and the embedded engine with the calculator's checkpoint, in alternating rounds with `run.shadow.share`
of 0 and of 1. Agents make conversations of two calls with a pause after each, in which the engine is idle. Prints p50
and p99 of their calls with and without, the ratios, and the number of shadow answers. Target: ratios of up to 1.05.
Timings of a machine that does other work are disturbed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

from agents_examples.calculator.tasks import random_problem
from proxy.cli.local_keys import load_or_make

CHECKPOINT = Path(__file__).parents[2] / "agents_examples" / "calculator" / "checkpoint"
MOST = 1.05
_READY_SECONDS = 180.0
# A change of a run's settings reaches the next calls a second later.
_SETTLE_SECONDS = 2.0


def measure(rounds: int, agents: int, seconds: float) -> dict[str, Any]:
    """Return the latencies of the calls, in seconds, by whether there were shadow answers, and figures of them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="base-rl-shadows-") as directory:
        command = [sys.executable, "-m", "proxy.cli", "up", "--model", str(CHECKPOINT), "--engine", "embedded"]
        command += ["--no-trainer", "--port", str(port), "--data-dir", directory]
        keys = load_or_make(Path(directory))
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
            try:
                return asyncio.run(
                    _rounds(f"http://127.0.0.1:{port}", keys.admin_key, keys.run_key, rounds, agents, seconds)
                )
            finally:
                process.send_signal(signal.SIGINT)
                process.wait(30)


async def _rounds(address: str, admin: str, run: str, rounds: int, agents: int, seconds: float) -> dict[str, Any]:
    async with httpx.AsyncClient(base_url=address, timeout=120.0) as client:
        return await _measured(client, admin, run, rounds, agents, seconds)


async def _measured(
    client: httpx.AsyncClient, admin: str, run: str, rounds: int, agents: int, seconds: float
) -> dict[str, Any]:
    await _ready(client)
    as_admin, as_agent = ({"authorization": f"Bearer {key}"} for key in (admin, run))
    found: dict[bool, list[float]] = {False: [], True: []}
    await _traffic(client, as_agent, agents, min(5.0, seconds))  # warms up both processes
    for number in range(2 * rounds):
        shadowed = number % 2 == 1
        share = 1.0 if shadowed else 0.0
        changed = await client.patch(
            "/api/v1/runs/policy", headers=as_admin, json={"settings": {"shadow": {"share": share}}}
        )
        changed.raise_for_status()
        await asyncio.sleep(_SETTLE_SECONDS)
        found[shadowed] += await _traffic(client, as_agent, agents, seconds)
    metrics = (await client.get("/metrics", headers=as_admin)).text
    shadows = sum(
        float(line.rsplit(" ", 1)[1])
        for line in metrics.splitlines()
        if line.startswith("base_rl_turns_total") and 'state="shadow"' in line
    )
    return {"found": found, "shadows": int(shadows)}


async def _traffic(client: httpx.AsyncClient, key: dict[str, str], agents: int, seconds: float) -> list[float]:
    until = time.monotonic() + seconds
    each = await asyncio.gather(*(_agent(client, key, number, until) for number in range(agents)))
    return [latency for latencies in each for latency in latencies]


async def _agent(client: httpx.AsyncClient, key: dict[str, str], number: int, until: float) -> list[float]:
    draw, found = random.Random(number), list[float]()
    while time.monotonic() < until:
        messages: list[dict[str, Any]] = [{"role": "user", "content": f"What is {random_problem(draw).expression}?"}]
        for _ in range(2):
            began = time.perf_counter()
            body = {"model": "policy", "messages": messages, "max_tokens": 48}
            reply = await client.post("/v1/chat/completions", headers=key, json=body)
            found.append(time.perf_counter() - began)
            reply.raise_for_status()
            messages += [reply.json()["choices"][0]["message"], {"role": "user", "content": "Are you sure?"}]
            await asyncio.sleep(draw.uniform(0.2, 0.6))  # the agent works, and the engine does not
    return found


async def _ready(client: httpx.AsyncClient) -> None:
    until = time.monotonic() + _READY_SECONDS
    while time.monotonic() < until:
        try:
            if (await client.get("/readyz")).status_code == 200:
                return
        except httpx.TransportError:
            pass
        await asyncio.sleep(0.5)
    raise TimeoutError(f"the proxy was not ready within {_READY_SECONDS:.0f} seconds")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ungrouped.latency", description=__doc__)
    parser.add_argument("--rounds", type=int, default=6, help="rounds with and without, each")
    parser.add_argument("--agents", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=20.0, help="length of a round")
    options = parser.parse_args()
    measured = measure(options.rounds, options.agents, options.seconds)
    figures = {
        name: {
            "calls": len(latencies),
            "p50_ms": round(1000 * statistics.median(latencies), 1),
            "p99_ms": round(1000 * statistics.quantiles(latencies, n=100)[98], 1),
        }
        for name, latencies in (("without", measured["found"][False]), ("with", measured["found"][True]))
    }
    ratios = {p: round(figures["with"][f"{p}_ms"] / figures["without"][f"{p}_ms"], 3) for p in ("p50", "p99")}
    print(json.dumps({**figures, "ratio": ratios, "shadow_answers": measured["shadows"]}, indent=2))
    return 0 if all(ratio <= MOST for ratio in ratios.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
