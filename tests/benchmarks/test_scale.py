"""The simulation of many proxies, and what the docs say of its result."""

from __future__ import annotations

import json

import pytest

from benchmarks.scale.__main__ import PROXIES, RESULTS
from benchmarks.scale.simulation import MOST_WRITES, Costs, Setup, most_proxies, proxy_transactions, simulated
from proxy.database import group_commit

COSTS = Costs(
    proxy_ms=2.0,
    database_ms=1.0,
    rows=3.0,
    wal_bytes=2000.0,
    bytes=2000.0,
    claim_proxy_ms=1.0,
    claim_database_ms=1.0,
)


def test_writes_that_wait_share_a_transaction() -> None:
    rare, rare_p99 = proxy_transactions(1.0, 2.0, 200.0, 0)
    assert rare == pytest.approx(1.0, rel=0.2), "a write alone is a transaction"
    assert rare_p99 == pytest.approx(2.0, rel=0.01)
    often, often_p99 = proxy_transactions(5000.0, 2.0, 5.0, 0)
    assert often == pytest.approx(500.0, rel=0.05), "one transaction after the other"
    assert 2.0 < often_p99 <= 4.1


def test_the_most_writes_of_a_transaction_are_the_stores() -> None:
    assert MOST_WRITES == group_commit.AT_ONCE


def test_proxies_add_up_until_postgresql_ends() -> None:
    one, ten = (simulated(count, COSTS, Setup(), seconds=2.0) for count in (1, 10))
    assert ten["calls_per_s"] == pytest.approx(10 * one["calls_per_s"])
    assert one["calls_per_s"] == pytest.approx(0.6 / (0.002 + 0.0001))
    assert one["database_cores"] == pytest.approx(one["calls_per_s"] * 0.0011)
    most = most_proxies(COSTS, Setup())
    assert simulated(most, COSTS, Setup(), seconds=1.0)["share_of_the_database"] <= 1
    assert simulated(most + 1, COSTS, Setup(), seconds=1.0)["share_of_the_database"] > 1


def test_the_docs_have_the_result() -> None:
    page = (RESULTS.parents[1] / "docs" / "scale.md").read_text()
    result = json.loads((RESULTS / "scale.json").read_text())
    for count in PROXIES:
        found = result["proxies"][str(count)]
        cells = [f"{found[name]:,.4g}" if found[name] < 1000 else f"{found[name]:,.0f}" for name in SHOWN]
        assert f"| {count} | {' | '.join(cells)} |" in page
    for name in ("cpu_per_call_2_workers_vs_1", "database_cpu_vs_proxy", "most_proxies"):
        assert f"**{result[name]}**" in page


SHOWN = (
    "calls_per_s",
    "sessions_per_s",
    "tokens_per_s",
    "transactions_per_s",
    "rows_per_s",
    "log_mb_per_s",
    "tables_gb_per_day",
    "claims_per_s",
    "database_cores",
    "write_p99_ms",
)
