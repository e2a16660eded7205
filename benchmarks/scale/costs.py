"""Costs of calls and claims with 1 and 2 workers of a proxy on PostgreSQL: seconds of CPU, transactions, rows, bytes.

CPU seconds of the workers and of PostgreSQL are read from the kernel, so the time that other programs take does not
count; how fast a core is at the moment does.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil  # type: ignore[import-untyped]

from benchmarks.postgresql import DURABLE, PostgresServer
from proxy.cli.addresses import random_free_port
from proxy.cli.local_keys import LocalKeys, load
from proxy.contract.claim import ClaimedBatch, ClaimRequest, decode, encode
from proxy.engines.scripted.script import MODEL

TURNS = 5
AGENTS = 16
_READY_SECONDS = 120.0
_CLAIM = 64
_DATABASE = "scale"


def measured(workers: int, sessions: int) -> dict[str, float]:
    """Return the costs with this number of workers, of `sessions` sessions of TURNS calls and one reward each."""
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="base-rl-scale-")))
        server = PostgresServer(DURABLE)
        stack.callback(server.remove)
        server.start()
        server.make_database(_DATABASE)
        postmaster = next(each for each in psutil.Process().children() if each.name() == "postgres")
        engine_port, port = random_free_port("127.0.0.1"), random_free_port("127.0.0.1")
        stack.enter_context(
            _process(["proxy.engines.scripted", "--port", str(engine_port)], directory / "engine.log")
        )
        variables = {
            "BASE_RL_SERVER__DATA_DIR": str(directory / "data"),
            "BASE_RL_DATABASE__URL": server.url(_DATABASE),
            "BASE_RL_ENGINE__URL": f"http://127.0.0.1:{engine_port}",
            "BASE_RL_RUN__MODEL": str(MODEL),
        }
        command = ["proxy.cli", "proxy", "--workers", str(workers), "--port", str(port)]
        parent = stack.enter_context(_process(command, directory / "proxy.log", variables))
        url = f"http://127.0.0.1:{port}"
        _until_ready(url, parent)
        keys = load(directory / "data")
        if keys is None:
            raise RuntimeError("`base-rl proxy` makes keys before it starts its workers")
        asyncio.run(_play(url, keys, 2 * AGENTS, "warm"))  # connections and caches exist
        before = _Reading.take(parent, postmaster, server)
        asyncio.run(_play(url, keys, sessions, "counted"))
        after = _Reading.take(parent, postmaster, server)
        claimed = asyncio.run(_claim(url, keys))
        last = _Reading.take(parent, postmaster, server)
        return {**_per_call(before, after, sessions * TURNS), **_per_trajectory(after, last, claimed)}


class _Reading:
    """What has been used until now: seconds of CPU, and PostgreSQL's own counts."""

    def __init__(self, proxy: float, database: float, by_worker: list[float], counts: dict[str, float]) -> None:
        self.proxy = proxy
        self.database = database
        self.by_worker = by_worker
        self.counts = counts

    @staticmethod
    def take(parent: subprocess.Popen[bytes], postmaster: Any, server: PostgresServer) -> _Reading:
        by_worker = [_seconds(each) for each in psutil.Process(parent.pid).children()]
        # The server's processes report to its statistics at most once a second while they are busy.
        time.sleep(1.5)
        with server.connect(_DATABASE) as connection:
            row = connection.execute(
                "SELECT xact_commit, tup_inserted + tup_updated, pg_database_size(current_database()),"
                " pg_current_wal_lsn() - '0/0' FROM pg_stat_database WHERE datname = current_database()"
            ).fetchone()
        if row is None:
            raise RuntimeError("PostgreSQL has statistics of every database")
        names = ("transactions", "rows", "bytes", "wal_bytes")
        counts = {name: float(str(value)) for name, value in zip(names, row, strict=True)}
        database = sum(_seconds(each) for each in [postmaster, *postmaster.children()])
        return _Reading(sum(by_worker), database, by_worker, counts)


def _per_call(before: _Reading, after: _Reading, calls: int) -> dict[str, float]:
    shares = [late - early for early, late in zip(before.by_worker, after.by_worker, strict=True)]
    found = {
        "calls": float(calls),
        "proxy_cpu_ms": 1000 * (after.proxy - before.proxy) / calls,
        "database_cpu_ms": 1000 * (after.database - before.database) / calls,
        "least_share_of_a_worker": min(shares) / sum(shares),
    }
    return found | {name: (after.counts[name] - before.counts[name]) / calls for name in before.counts}


def _per_trajectory(before: _Reading, after: _Reading, trajectories: int) -> dict[str, float]:
    return {
        "claimed": float(trajectories),
        "claim_proxy_cpu_ms": 1000 * (after.proxy - before.proxy) / trajectories,
        "claim_database_cpu_ms": 1000 * (after.database - before.database) / trajectories,
    }


def _seconds(process: Any) -> float:
    """Return the seconds of CPU of a process, and of its children that have ended."""
    try:
        times = process.cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return float(times.user + times.system + times.children_user + times.children_system)


async def _play(url: str, keys: LocalKeys, sessions: int, prefix: str) -> None:
    """Let AGENTS agents, each with a connection of its own, go through the sessions."""
    waiting = iter(range(sessions))

    async def agent() -> None:
        headers = {"authorization": f"Bearer {keys.run_key}"}
        async with httpx.AsyncClient(base_url=url, headers=headers, timeout=120) as client:
            for number in waiting:
                await _session(client, f"{prefix}-{number}")

    await asyncio.gather(*(agent() for _ in range(AGENTS)))


async def _session(client: httpx.AsyncClient, name: str) -> None:
    messages: list[Any] = [{"role": "user", "content": f"{name}: " + "a question of some length " * 20}]
    for turn in range(TURNS):
        answer = await client.post(
            "/v1/chat/completions",
            json={"model": "policy", "messages": messages},
            headers={"x-base-rl-session": name},
        )
        answer.raise_for_status()
        messages += [answer.json()["choices"][0]["message"], {"role": "user", "content": f"and then? {turn}"}]
    (await client.post("/v1/feedback", json={"session_id": name, "reward": 1.0})).raise_for_status()


async def _claim(url: str, keys: LocalKeys) -> int:
    """Claim all sessions, and return their number."""
    claimed = 0
    headers = {"authorization": f"Bearer {keys.trainer_key}"}
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=120) as client:
        while True:
            request = ClaimRequest(trainer="benchmark", want=_CLAIM)
            answer = await client.post("/api/v1/runs/policy/claims", content=encode(request))
            answer.raise_for_status()
            batch = decode(answer.content, ClaimedBatch)
            if batch.claim_id is None:
                return claimed
            claimed += batch.trajectory_count


def _until_ready(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _READY_SECONDS
    while True:
        try:
            if httpx.get(f"{url}/readyz", timeout=5.0).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError("the proxy did not become ready")
        time.sleep(0.2)


@contextmanager
def _process(
    arguments: list[str], log: Path, variables: dict[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("BASE_RL_")}
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", *arguments], env={**kept, **(variables or {})}, stdout=output, stderr=output
        )
        try:
            yield process
        finally:
            process.terminate()
            process.wait(60)
