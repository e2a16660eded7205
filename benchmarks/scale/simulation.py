"""A simulation of many proxies on one PostgreSQL, from costs that were measured.

Every proxy is one worker on one core. Calls arrive at random, in a Poisson process; each takes the proxy's core for
its measured time, and its turn is written in a transaction together with all other turns that wait then, as
`database/group_commit.py` does. PostgreSQL's cores and its log are then compared with what all proxies write.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass

MOST_WRITES = 64
"""Most writes of one transaction, as in `database/group_commit.py`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Costs:
    """Costs of one call: milliseconds of CPU of the proxy and of PostgreSQL, rows, bytes of the log and of tables.
    `claim_*_ms` are those of one claimed trajectory."""

    proxy_ms: float
    database_ms: float
    rows: float
    wal_bytes: float
    bytes: float
    claim_proxy_ms: float
    claim_database_ms: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """What is assumed and not measured."""

    utilisation: float = 0.6
    """Share of its core that a proxy is busy: below it, calls do not queue for long."""
    commit_ms: float = 2.0
    """Time of a transaction, which waits for the disk."""
    turns_per_session: int = 10
    tokens_per_turn: int = 500
    """Tokens that a turn adds to its session."""
    claim_size: int = 128
    database_cores: int = 32
    database_utilisation: float = 0.7
    log_mb_per_s: float = 500.0
    """What the disk of PostgreSQL's log writes in a second."""


def proxy_transactions(calls_per_s: float, commit_ms: float, seconds: float, seed: int) -> tuple[float, float]:
    """Simulate the writes of one proxy. Return transactions per second, and the 99th percentile of the milliseconds
    from the end of a call to the end of its transaction."""
    numbers = random.Random(seed)
    waiting: deque[float] = deque()
    waits: list[float] = []
    arrival, free, transactions = numbers.expovariate(calls_per_s), 0.0, 0
    while arrival < seconds or waiting:
        begin = max(free, waiting[0] if waiting else arrival)
        while arrival <= begin and arrival < seconds:
            waiting.append(arrival)
            arrival += numbers.expovariate(calls_per_s)
        free = begin + commit_ms / 1000
        transactions += 1
        for _ in range(min(MOST_WRITES, len(waiting))):
            waits.append(1000 * (free - waiting.popleft()))
    ordered = sorted(waits)
    return transactions / seconds, ordered[int(0.99 * (len(ordered) - 1))]


def simulated(proxies: int, costs: Costs, setup: Setup, *, seconds: float = 30.0, seed: int = 0) -> dict[str, float]:
    """Return what this number of proxies does in a second, and how much of PostgreSQL it takes."""
    per_call = costs.proxy_ms + costs.claim_proxy_ms / setup.turns_per_session
    calls = 1000 * setup.utilisation / per_call
    transactions, p99 = proxy_transactions(calls, setup.commit_ms, seconds, seed)
    everything = proxies * calls
    database_ms = costs.database_ms + costs.claim_database_ms / setup.turns_per_session
    cores = everything * database_ms / 1000
    log = everything * costs.wal_bytes / 1e6
    return {
        "calls_per_s": everything,
        "sessions_per_s": everything / setup.turns_per_session,
        "tokens_per_s": everything * setup.tokens_per_turn,
        "claims_per_s": everything / setup.turns_per_session / setup.claim_size,
        "transactions_per_s": proxies * transactions,
        "rows_per_s": everything * costs.rows,
        "write_p99_ms": p99,
        "log_mb_per_s": log,
        "tables_gb_per_day": everything * costs.bytes * 86_400 / 1e9,
        "database_cores": cores,
        "share_of_the_database": max(
            cores / (setup.database_cores * setup.database_utilisation), log / setup.log_mb_per_s
        ),
    }


def most_proxies(costs: Costs, setup: Setup) -> int:
    """Return how many proxies one PostgreSQL serves."""
    one = simulated(1, costs, setup, seconds=1.0)
    return int(1 / one["share_of_the_database"])
