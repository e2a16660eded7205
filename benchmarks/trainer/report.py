"""The figures as tables, compared with the targets."""

from __future__ import annotations

from typing import Any

from benchmarks.targets import Target
from benchmarks.trainer.workloads import WORKLOADS

SYSTEMS = ("padded", "packed", "tree", "trl")


def judged(result: dict[str, Any]) -> list[Target]:
    chunked = result["peak_mb"]["chunked"].values()
    return [
        Target(what="packed against TRL, single-turn", measured=result["packed_vs_trl"], bound=1.5, at_least=True),
        Target(
            what="tree against packed, shared prefix", measured=result["tree_vs_packed"], bound=3.0, at_least=True
        ),
        Target(what="peak memory, most against least", measured=max(chunked) / min(chunked), bound=1.25),
    ]


def page_rows(result: dict[str, Any]) -> list[list[str]]:
    """Return rows of trained tokens per CPU-second: a row for each workload, a column for each system."""
    by_system = result["tokens_per_cpu_s"]
    return [
        [name.replace("_", " "), *(f"{by_system[system][name]:,.0f}" for system in SYSTEMS)] for name in WORKLOADS
    ]


def memory_rows(result: dict[str, Any]) -> list[list[str]]:
    peaks = result["peak_mb"]
    return [
        [
            size.replace(" x ", " × "),
            f"{peak:,.0f}",
            f"{peaks['whole'][size]:,.0f}" if size in peaks["whole"] else "–",
        ]
        for size, peak in peaks["chunked"].items()
    ]


def shown(result: dict[str, Any]) -> str:
    rows = [["trained tokens / CPU s", *SYSTEMS], *page_rows(result), [], ["peak MB", "chunked", "whole"]]
    rows += memory_rows(result)
    lines = [
        "".join(f"{cell:<24}" if place == 0 else f"{cell:>12}" for place, cell in enumerate(row)) for row in rows
    ]
    for target in judged(result):
        mark = "reached" if target.reached else "NOT REACHED"
        lines.append(
            f"{target.what:<40}{target.measured:>8.2f}  {'≥' if target.at_least else '≤'} {target.bound}  {mark}"
        )
    return "\n".join(lines)
