"""Model calls of agents while a thousand judgements run, and calls without: the part `calls` of `make bench-jobs`.

One proxy on SQLite runs the jobs itself, with the default concurrency, before a scripted engine that takes 20 ms.
In turns, agents call alone, and beside a judge that was just added and asked to score the ended sessions (`rejudge`,
500 at a time). A judge's model takes 300 ms, less than most, so the load is higher than usual. Each pair of rounds
gives a ratio, and the median of these counts: other work on the machine hits both rounds of a pair alike.
`cpu_ms_per_judgement` is the CPU time of the proxy alone, which other work hardly changes.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec

from benchmarks.pool.installation import HOST, Installation, installed, quoted
from benchmarks.proxy.conversations import ANSWER, MODEL_NAME, post, question
from benchmarks.proxy.load import Connection
from benchmarks.proxy.measures import quantile
from benchmarks.proxy.systems import thread_seconds
from benchmarks.targets import Target
from proxy.cli.addresses import random_free_port
from proxy.cli.supervisor import Part
from proxy.engines.launch import scripted_plan
from proxy.engines.scripted.script import MODEL

ENGINE_MS = 20
JUDGE_MS = 300
AGENTS = 4
PAUSE_SECONDS = 0.05
"""Seconds of an agent's work between two calls. Agents that never paused would measure a saturated machine."""
RATIO = 1.05
_AT_ONCE = 500
_OPENING = 16
# A change of a run's settings reaches the next calls a second later.
_SETTLE_SECONDS = 2.0
_DRAIN_SECONDS = 300.0
_JUDGED = "SELECT COUNT(*) FROM judgements WHERE error IS NULL"
_UNFINISHED = "SELECT COUNT(*) FROM jobs WHERE kind = 'judge' AND state IN ('waiting', 'running', 'failed')"


class Effort(msgspec.Struct, frozen=True, kw_only=True):
    """Ended sessions, pairs of rounds, and seconds of a round."""

    sessions: int
    pairs: int
    seconds: float


FULL = Effort(sessions=1000, pairs=6, seconds=15.0)
SHORT = Effort(sessions=50, pairs=1, seconds=2.0)


async def measure(folder: Path, effort: Effort) -> dict[str, Any]:
    """Return p50 and p99 of the calls in milliseconds, with and without judgements, and their ratios."""
    script = folder / "script.toml"
    script.write_text(f"[[rule]]\ntext = {quoted(ANSWER)}\ndelay_ms = {ENGINE_MS}\n")
    engine_port, judge_port = random_free_port(HOST), random_free_port(HOST)
    plan = scripted_plan(model=str(MODEL), port=engine_port, script=script)
    parts = [
        Part(name="engine", argv=plan.argv, env=plan.env),
        Part(name="judge", argv=(sys.executable, "-m", "benchmarks.jobs.judge_stub", str(judge_port), str(JUDGE_MS))),
    ]
    config = (
        f"[run]\nname = {quoted(MODEL_NAME)}\nmodel = {quoted(MODEL)}\n\n"
        f"[providers.stub]\nbase_url = {quoted(f'http://{HOST}:{judge_port}/v1')}\n"
    )
    async with installed(folder / "run", parts, [plan.url], config, engine_kind="scripted") as installation:
        return await _Rounds(installation, effort, await installation.key_of(MODEL_NAME)).measure()


class _Rounds:
    """The rounds on one installation."""

    def __init__(self, installation: Installation, effort: Effort, key: str) -> None:
        self._installation = installation
        self._effort = effort
        self._key = key
        self._conversations = itertools.count(1)

    async def measure(self) -> dict[str, Any]:
        await self._open_sessions()
        await self._agents(min(3.0, self._effort.seconds))  # warms up all processes
        alone: list[list[float]] = []
        beside: list[list[float]] = []
        judged: list[int] = []
        cpu: list[float] = []
        for number in range(self._effort.pairs):
            began = self._cpu_seconds()
            alone.append(await self._agents(self._effort.seconds))
            per_call = (self._cpu_seconds() - began) / len(alone[-1])
            taken, count, seconds = await self._beside(number)
            cpu.append((seconds - per_call * len(taken)) / max(1, count))
            beside.append(taken)
            judged.append(count)
            p50, other = (1000 * quantile(each[-1], 0.5) for each in (alone, beside))
            print(f"  pair {number + 1}: p50 {p50:.2f} ms, {other:.2f} ms beside {count} judgements", flush=True)
        return {
            "engine_ms": ENGINE_MS,
            "judge_ms": JUDGE_MS,
            "sessions": self._effort.sessions,
            "pairs": self._effort.pairs,
            "judgements": sum(judged),
            "judgements_per_s": round(sum(judged) / (self._effort.pairs * self._effort.seconds), 1),
            "cpu_ms_per_judgement": round(1000 * statistics.median(cpu), 2),
            "calls": sum(map(len, (*alone, *beside))),
            **_figures("alone", alone),
            **_figures("beside", beside),
            **{f"p{level}_ratio": ratio_of(beside, alone, level / 100) for level in (50, 99)},
        }

    async def _open_sessions(self) -> None:
        """Make sessions of one call each, and end them."""
        numbers = iter(range(self._effort.sessions))

        async def open_some(client: httpx.AsyncClient) -> None:
            for _ in numbers:
                reply = await client.post("/v1/chat/completions", content=self._body())
                reply.raise_for_status()
                session = reply.headers["x-base-rl-session"]
                (await client.post(f"/v1/sessions/{session}/end", json={})).raise_for_status()

        headers = {"authorization": f"Bearer {self._key}", "content-type": "application/json"}
        async with httpx.AsyncClient(base_url=self._installation.url, headers=headers, timeout=30) as client:
            await asyncio.gather(*(open_some(client) for _ in range(_OPENING)))

    async def _beside(self, number: int) -> tuple[list[float], int, float]:
        """Return the seconds of calls beside a judge that is new in this round, how many sessions it scored, and the
        proxy's CPU seconds."""
        judge = {"kind": "rubric", "model": "stub/judge", "rubric": f"Does the answer add the numbers? ({number})"}
        await self._set_judge(judge)
        before, began = self._count(_JUDGED), self._cpu_seconds()
        calls = asyncio.create_task(self._agents(self._effort.seconds))
        path, more = f"/api/v1/runs/{MODEL_NAME}/judges/adds/rejudge", True
        while more:
            reply = await self._installation.admin.post(path, json={})
            reply.raise_for_status()
            more = reply.json()["more"]
        taken = await calls
        judged, seconds = self._count(_JUDGED) - before, self._cpu_seconds() - began
        # A judge that is gone scores nothing: the rest of its jobs ends at once.
        await self._set_judge(None)
        deadline = time.monotonic() + _DRAIN_SECONDS
        while self._count(_UNFINISHED):
            if time.monotonic() > deadline:
                raise TimeoutError(f"judging jobs do not end within {_DRAIN_SECONDS:.0f} seconds")
            await asyncio.sleep(0.2)
        return taken, judged, seconds

    async def _set_judge(self, judge: dict[str, Any] | None) -> None:
        body = {"settings": {"judges": {"adds": judge}}}
        reply = await self._installation.admin.patch(f"/api/v1/runs/{MODEL_NAME}", json=body)
        reply.raise_for_status()
        await asyncio.sleep(_SETTLE_SECONDS)

    async def _agents(self, seconds: float) -> list[float]:
        """Return the seconds of the calls of all agents in a round."""
        until = time.monotonic() + seconds
        each = await asyncio.gather(*(self._agent(until, number) for number in range(AGENTS)))
        return list(itertools.chain.from_iterable(each))

    async def _agent(self, until: float, number: int) -> list[float]:
        # Agents that began together would meet each other at every call.
        await asyncio.sleep(PAUSE_SECONDS * number / AGENTS)
        connection = await Connection.open(self._installation.port)
        taken: list[float] = []
        for request in self._requests():
            if time.monotonic() >= until:
                break
            taken.append((await connection.call(request, stream=False)).whole)
            await asyncio.sleep(PAUSE_SECONDS)
        connection.close()
        return taken

    def _requests(self) -> Iterator[bytes]:
        while True:
            yield post("/v1/chat/completions", self._body(), f"authorization: Bearer {self._key}\r\n")

    def _body(self) -> bytes:
        """Return a call that begins a conversation of its own."""
        messages = [{"role": "user", "content": question(next(self._conversations), 1)}]
        return json.dumps({"model": MODEL_NAME, "messages": messages, "max_tokens": 64}).encode()

    def _cpu_seconds(self) -> float:
        """Return the CPU time of the proxy so far."""
        tasks = Path("/proc") / str(self._installation.supervisor.pid("proxy")) / "task"
        return sum(thread_seconds(tasks))

    def _count(self, query: str) -> int:
        return int(self._installation.rows(query)[0][0])


def targets(result: dict[str, Any]) -> list[Target]:
    """Return the targets of the full effort."""
    return [
        Target(what="p50 of calls while judgements run, over p50 alone", measured=result["p50_ratio"], bound=RATIO),
        Target(
            what="judgements that ran beside calls",
            measured=result["judgements"],
            bound=FULL.sessions,
            at_least=True,
        ),
    ]


def _figures(name: str, rounds: list[list[float]]) -> dict[str, float]:
    """Return the medians of the rounds' percentiles, in milliseconds."""
    return {
        f"{name}_p{level}_ms": round(statistics.median(1000 * quantile(each, level / 100) for each in rounds), 2)
        for level in (50, 99)
    }


def ratio_of(beside: list[list[float]], alone: list[list[float]], share: float) -> float:
    """Return the median of the pairs' ratios."""
    pairs = zip(beside, alone, strict=True)
    return round(statistics.median(quantile(one, share) / quantile(other, share) for one, other in pairs), 3)
