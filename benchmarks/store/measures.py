"""Measurements of a store that has grown: claims, and the queries of the admin page."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from benchmarks.store.filling import Proxy
from proxy.clock import system_clock
from proxy.contract.claim import ClaimRequest, encode
from proxy.contract.identifiers import ClaimId
from proxy.lifecycle.signals import Signals
from proxy.overview.figures import REFRESH_SECONDS
from proxy.overview.filters import SessionFilter
from proxy.overview.rewards.views import RewardFilter
from proxy.overview.service import OverviewService

CLAIMS = 200
LOOKS = 40
_HELD = 4


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least `share` of them do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def figures(milliseconds: Sequence[float]) -> dict[str, float]:
    return {"p50": round(statistics.median(milliseconds), 2), "p99": round(percentile(milliseconds, 0.99), 2)}


async def claims(proxy: Proxy) -> dict[str, float]:
    """Return milliseconds from the request for 128 trajectories to the encoded answer."""
    taken: list[float] = []
    while len(taken) < CLAIMS:
        held: list[ClaimId] = []
        for _ in range(_HELD):
            began = time.perf_counter()
            batch = await proxy.claims.claim(
                proxy.run, ClaimRequest(trainer="bench", want=128, max_staleness=1 << 30)
            )
            encode(batch)
            milliseconds = 1000 * (time.perf_counter() - began)
            if batch.claim_id is None or batch.trajectory_count != 128:
                break
            taken.append(milliseconds)
            held.append(batch.claim_id)
        for claim_id in held:
            await proxy.claims.release(proxy.run, claim_id)
        if not held:
            raise RuntimeError("fewer than 128 sessions are claimable")
    return figures(taken)


async def first_look(proxy: Proxy) -> float:
    """Return milliseconds until a starting proxy has computed all figures in advance: earlier requests wait that
    long."""
    overview = OverviewService(database=proxy.database, clock=system_clock, signals=Signals())
    began = time.perf_counter()
    await overview.refresh_figures()
    milliseconds = 1000 * (time.perf_counter() - began)
    overview.close()
    return round(milliseconds, 2)


async def admin(proxy: Proxy, seed: int = 0) -> dict[str, dict[str, float]]:
    """Return milliseconds of each query about random objects, while the proxy computes figures in advance as
    usual."""
    ahead = asyncio.create_task(_refresh_figures(proxy.overview))
    try:
        await proxy.overview.refresh_figures()
        return await _admin(proxy, seed)
    finally:
        ahead.cancel()
        await asyncio.gather(ahead, return_exceptions=True)


async def _refresh_figures(overview: OverviewService) -> None:
    while True:
        await overview.refresh_figures()
        await asyncio.sleep(REFRESH_SECONDS)


async def _admin(proxy: Proxy, seed: int) -> dict[str, dict[str, float]]:
    overview, run, draw = proxy.overview, "policy", random.Random(seed)
    first = await overview.sessions(run, SessionFilter(), limit=200)
    rewards = await overview.ledger.page(proxy.run.id, RewardFilter(), limit=200)
    steps = await overview.steps(run, limit=50)
    long = proxy.filled.long_sessions
    turn = (await overview.session(long[0])).turns[-1].id
    deep = first.next_cursor
    queries: dict[str, Callable[[], Awaitable[Any]]] = {
        "runs": overview.runs,
        "run": lambda: overview.run(run),
        "curves": lambda: overview.curves(run),
        "sessions": lambda: overview.sessions(run, SessionFilter(), limit=50),
        "sessions_next_page": lambda: overview.sessions(run, SessionFilter(), cursor=deep, limit=50),
        "sessions_ready": lambda: overview.sessions(run, SessionFilter(training="ready"), limit=50),
        "sessions_open": lambda: overview.sessions(run, SessionFilter(state="open"), limit=50),
        "sessions_by_reward": lambda: overview.sessions(run, SessionFilter(min_reward=0.5), limit=50),
        "sessions_none_match": lambda: overview.sessions(run, SessionFilter(min_reward=1e6), limit=50),
        "sessions_expired": lambda: overview.sessions(run, SessionFilter(training="expired"), limit=50),
        "session_of_50_turns": lambda: overview.session(draw.choice(long), with_tokens=True),
        "session": lambda: overview.session(draw.choice(first.sessions).id),
        "turn": lambda: overview.turn(turn, with_tokens=True),
        "rewards": lambda: overview.ledger.page(proxy.run.id, RewardFilter(), limit=50),
        "rewards_next_page": lambda: overview.ledger.page(
            proxy.run.id, RewardFilter(), cursor=rewards.next_cursor, limit=50
        ),
        "rewards_of_a_source": lambda: overview.ledger.page(proxy.run.id, RewardFilter(source="nobody"), limit=50),
        "rewards_revised": lambda: overview.ledger.revised(proxy.run.id, limit=50),
        "steps": lambda: overview.steps(run, limit=50),
        "step": lambda: overview.step(run, draw.choice(steps.steps).version),
        "snapshot": lambda: overview.snapshot(proxy.run.id, after=None),
        "health": overview.health,
        "sessions_by_training": overview.sessions_by_training,
    }
    taken: dict[str, dict[str, float]] = {}
    for name, query in queries.items():
        milliseconds = []
        for _ in range(LOOKS):
            began = time.perf_counter()
            await query()
            milliseconds.append(1000 * (time.perf_counter() - began))
        taken[name] = figures(milliseconds)
    return taken
