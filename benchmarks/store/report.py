"""The figures as a table, compared with the targets."""

from __future__ import annotations

import dataclasses
from typing import Any

from benchmarks.targets import Target


def slowest_admin(found: dict[str, Any]) -> tuple[str, float]:
    """Return the query with the highest p99, in milliseconds."""
    name = max(found["admin_ms"], key=lambda name: found["admin_ms"][name]["p99"])
    return name, found["admin_ms"][name]["p99"]


def targets(found: dict[str, Any]) -> list[Target]:
    """Return the targets of one database."""
    early, late = found["claim_ms"]["early"], found["claim_ms"]["late"]
    _, admin = slowest_admin(found)
    return [
        Target(what="turns/s taken in", measured=found["ingest_turns_per_s"], bound=1000, at_least=True),
        Target(what="claim of 128, p99 ms", measured=late["p99"], bound=50),
        Target(what="claim p50, grown against early", measured=late["p50"] / early["p50"], bound=1.5),
        Target(what="bytes a token", measured=found["bytes_per_token"], bound=14),
        Target(what="bytes of 50-turn conversations", measured=found["conversation_bytes_ratio"], bound=1.3),
        Target(what="slowest admin query, p99 ms", measured=admin, bound=100),
        Target(what="growth of memory during the fill, MB", measured=found["rss_growth_mb"], bound=50),
    ]


def judged(result: dict[str, Any]) -> list[Target]:
    return [
        dataclasses.replace(target, what=f"{name}: {target.what}")
        for name, found in result["databases"].items()
        for target in targets(found)
    ]


def page_rows(result: dict[str, Any]) -> list[list[str]]:
    """Return the rows of the performance page: figure, target, and a column for each database."""
    columns = [targets(found) for found in result["databases"].values()]
    return [
        [row[0].what, f"{_sign(row[0])} {row[0].bound:g}", *(f"{target.measured:,.2f}" for target in row)]
        for row in zip(*columns, strict=True)
    ]


def shown(result: dict[str, Any]) -> str:
    lines = []
    for target in judged(result):
        mark = "reached" if target.reached else "NOT REACHED"
        lines.append(f"{target.what:<60} {target.measured:>10,.2f}  {_sign(target)} {target.bound:g}  {mark}")
    for name, found in result["databases"].items():
        query, milliseconds = slowest_admin(found)
        lines.append(f"{name}: the slowest admin query is {query}, {milliseconds:.1f} ms")
    return "\n".join(lines)


def _sign(target: Target) -> str:
    return "≥" if target.at_least else "≤"
