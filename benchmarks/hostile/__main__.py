"""The effect of one hostile client on all others: `python -m benchmarks.hostile`, or `make bench-hostile`.

A proxy in front of the scripted engine answers `/healthz` and an agent's calls, which are sent at a steady pace
whether or not earlier ones were answered, while one client sends the worst bodies of every kind and dialect, one
after another. The figures are the milliseconds that the client adds to the 99th percentile of the others' waits, as
medians over the rounds, and the memory that is not released, as the worst of the rounds. Writes
`benchmarks/results/hostile.json` and prints the figures last; the exit status is 0 if the targets were reached.

`--short` sends bodies of 1 MiB once and writes nothing; `--only TEXT` sends the bodies whose name contains the text.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.hostile.bodies import MIB, Body, all_bodies
from benchmarks.machine import describe
from benchmarks.proxy.load import Connection, Failed
from benchmarks.proxy.measures import check, quantile
from benchmarks.proxy.systems import BASE_RL, RUN_KEY, Bench, System
from benchmarks.targets import Target, target_rows

RESULT = Path(__file__).parents[1] / "results" / "hostile.json"
FOLDER = Path(".base-rl") / "bench-hostile"
SIZE = 32 * MIB - 1024
PERIOD = 0.025
"""Seconds between two calls of one prober: a tenth of what two cores can serve, so that the probers' own load adds no
wait."""
BASELINE_SECONDS = 5.0
REST_SECONDS = 2.5
"""Seconds of rest after every request: the proxy releases memory one second after its end."""
PATIENCE = 180.0
ADDED_MS = 100.0
RESIDENT_MIB = 100.0


@dataclass
class Prober:
    """Calls at a steady pace. A call is timed from when it was due, so that a stall is not hidden by the calls that
    it delays."""

    name: str
    port: int
    next_request: Callable[[], bytes]
    taken: list[float] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    _running: set[asyncio.Task[None]] = field(default_factory=set)
    _free: list[Connection] = field(default_factory=list)

    async def run(self, stop: asyncio.Event) -> None:
        due = time.perf_counter()
        while not stop.is_set():
            due += PERIOD
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            task = asyncio.create_task(self._one(due))
            self._running.add(task)
            task.add_done_callback(self._running.discard)
        await asyncio.gather(*self._running)

    def take(self) -> list[float]:
        """Return the milliseconds of the calls since the last time."""
        taken, self.taken = self.taken, []
        return taken

    @property
    def waiting(self) -> int:
        return len(self._running)

    async def _one(self, due: float) -> None:
        connection: Connection | None = None
        try:
            connection = self._kept() or await Connection.open(self.port)
            await connection.call(self.next_request(), stream=False)
        except (Failed, OSError, RuntimeError) as error:  # uvloop's, of a connection that was closed
            self.failed.append(repr(error))
        else:
            self._free.append(connection)
        self.taken.append((time.perf_counter() - due) * 1000)

    def _kept(self) -> Connection | None:
        """Return a free connection. Connections that were opened during a stall stay unused until the server closes
        them."""
        self._free = [connection for connection in self._free if not connection.is_closed]
        return self._free.pop() if self._free else None


def send(port: int, body: Body) -> tuple[int, str]:
    """Send a request and return its status and error code."""
    path, content = body
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    headers = {"authorization": f"Bearer {RUN_KEY}", "content-type": "application/json"}
    try:
        connection.request("POST", path, content, headers)
        reply = connection.getresponse()
        answered = reply.read()
    except OSError:  # closed before the body was whole
        return 0, "closed"
    finally:
        connection.close()
    try:
        error = json.loads(answered).get("error") or {}
    except ValueError:
        return reply.status, ""
    return reply.status, str(error.get("code") or error.get("type") or "")


def resident_mib(pid: int) -> float:
    for line in (Path("/proc") / str(pid) / "status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError("the proxy has ended")


async def settled(probers: list[Prober]) -> None:
    """Wait until the probers keep their pace again."""
    await asyncio.sleep(2 * PERIOD)
    while any(prober.waiting > 1 for prober in probers):  # noqa: ASYNC110 - no single event tells of the pace
        await asyncio.sleep(PERIOD)


async def attack(system: System, probers: list[Prober], body: Body) -> dict[str, Any]:
    """Send one hostile request, and return the waits of the probers until it was answered and no call was late any
    more."""
    for prober in probers:
        prober.take()
        prober.failed.clear()
    peak = before = resident_mib(system.measured)
    begun = time.perf_counter()
    sending = asyncio.ensure_future(asyncio.to_thread(send, system.port, body))
    while not sending.done():
        await asyncio.wait((sending,), timeout=0.05)
        peak = max(peak, resident_mib(system.measured))
    status, code = sending.result()
    seconds = time.perf_counter() - begun
    await asyncio.sleep(0.2)  # calls that were due during the attack are answered now
    seen = {prober.name: prober.take() for prober in probers}
    return {
        "status": status,
        "code": code,
        "seconds": seconds,
        "peak_mib": peak - before,
        "failed": sum(len(prober.failed) for prober in probers),
        **{
            f"{name}_{key}": value
            for name, taken in seen.items()
            for key, value in (("p99", quantile(taken, 0.99)), ("max", max(taken)))
        },
    }


async def run(size: int, repeats: int, only: str) -> dict[str, Any]:
    with Bench(folder=FOLDER) as bench:
        system = bench.start(BASE_RL)
        await check(system)
        agent = system.requests(3, False)
        health = b"GET /healthz HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"
        probers = [
            Prober("healthz", system.port, lambda: health),
            Prober("agent", system.port, lambda: next(agent)),
        ]
        stop = asyncio.Event()
        running = [asyncio.create_task(prober.run(stop)) for prober in probers]
        await asyncio.sleep(2)
        for prober in probers:
            prober.take()
        await asyncio.sleep(BASELINE_SECONDS)
        baseline = {prober.name: quantile(prober.take(), 0.99) for prober in probers}
        requests: dict[str, Any] = {}
        for name, body in all_bodies(size):
            if only not in name:
                continue
            rounds = []
            for _ in range(repeats):
                await settled(probers)  # making the body delayed the probers themselves
                before = resident_mib(system.measured)
                found = await attack(system, probers, body)
                await asyncio.sleep(REST_SECONDS)
                rounds.append({**found, "kept_mib": resident_mib(system.measured) - before})
            requests[name] = {**over_rounds(rounds), "mib": len(body[1]) / MIB}
            print(line(name, requests[name]), flush=True)
        stop.set()
        await asyncio.gather(*running)
    return {"baseline_p99": baseline, "requests": requests}


def over_rounds(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return medians of the added waits, because some rounds contain pauses of the machine itself, and the worst of
    all other figures."""
    return {
        key: (statistics.median if key.endswith("_p99") else max)([each[key] for each in rounds]) for key in rounds[0]
    }


def line(name: str, found: dict[str, Any]) -> str:
    return (
        f"{name:<46}{found['mib']:6.1f} MiB {found['status']:4} {found['code']:<24}{found['seconds']:7.2f} s"
        f"  healthz p99 {found['healthz_p99']:7.1f} max {found['healthz_max']:7.1f}"
        f"  agent p99 {found['agent_p99']:7.1f} max {found['agent_max']:7.1f} ms"
        f"  peak {found['peak_mib']:6.0f} kept {found['kept_mib']:5.0f} MiB"
    )


def judged(result: dict[str, Any]) -> list[Target]:
    requests = result["requests"].values()
    return [
        *(
            Target(
                what=f"added to {what}, p99 under the worst request, ms",
                measured=max(each[f"{key}_p99"] for each in requests) - result["baseline_p99"][key],
                bound=ADDED_MS,
            )
            for key, what in (("healthz", "/healthz"), ("agent", "another agent's calls"))
        ),
        Target(what="calls of others that failed", measured=max(each["failed"] for each in requests), bound=0),
        Target(
            what="memory that does not come back, MiB",
            measured=max(each["kept_mib"] for each in requests),
            bound=RESIDENT_MIB,
        ),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--only", default="")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    size, repeats = (MIB, 1) if options.short else (SIZE, options.repeats)
    result = {"machine": describe(), **uvloop.run(run(size, repeats, options.only))}
    if not options.short and not options.only:
        RESULT.write_text(json.dumps(json.loads(json.dumps(result), parse_float=rounded), indent=2) + "\n")
    targets = judged(result)
    for what, bound, measured in target_rows(targets):
        print(f"{what}: {measured} ({bound})")
    return 0 if all(target.reached for target in targets) else 1


def rounded(text: str) -> float:
    """Round to one digit after the point: more is noise."""
    return round(float(text), 1)


if __name__ == "__main__":
    sys.exit(main())
