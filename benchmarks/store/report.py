"""The figures as a table, judged against the targets."""

from __future__ import annotations

from typing import Any

from benchmarks.targets import Target


def slowest_admin(found: dict[str, Any]) -> tuple[str, float]:
    """The query with the highest p99, in milliseconds."""
    name = max(found["admin_ms"], key=lambda name: found["admin_ms"][name]["p99"])
    return name, found["admin_ms"][name]["p99"]


def judged(result: dict[str, Any]) -> list[Target]:
    targets = []
    for name, found in result["databases"].items():
        early, late = found["claim_ms"]["early"], found["claim_ms"]["late"]
        query, admin = slowest_admin(found)
        targets += [
            Target(what=f"{name}: turns/s taken in", measured=found["ingest_turns_per_s"], bound=1000, at_least=True),
            Target(what=f"{name}: claim of 128, p99 ms", measured=late["p99"], bound=50),
            Target(what=f"{name}: claim p50, grown against early", measured=late["p50"] / early["p50"], bound=1.5),
            Target(what=f"{name}: bytes a token", measured=found["bytes_per_token"], bound=14),
            Target(
                what=f"{name}: bytes of 50-turn conversations", measured=found["conversation_bytes_ratio"], bound=1.3
            ),
            Target(what=f"{name}: slowest admin query ({query}), p99 ms", measured=admin, bound=100),
            Target(what=f"{name}: growth of memory during the fill, MB", measured=found["rss_growth_mb"], bound=50),
        ]
    return targets


def shown(result: dict[str, Any]) -> str:
    lines = []
    for target in judged(result):
        mark = "reached" if target.reached else "NOT REACHED"
        sign = "≥" if target.at_least else "≤"
        lines.append(f"{target.what:<60} {target.measured:>10,.2f}  {sign} {target.bound:g}  {mark}")
    return "\n".join(lines)
