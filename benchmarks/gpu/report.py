"""The figures as tables, compared with the targets."""

from __future__ import annotations

from typing import Any

from benchmarks.targets import Target

ENGINES: dict[str, dict[str, Any]] = {
    "fsdp": {"backend": "fsdp"},
    "archon": {"backend": "archon", "compile": True},
    "archon_eager": {"backend": "archon"},
}
"""The settings of the trainer for each engine."""
_JUDGED = ("fsdp", "archon")


def judged(result: dict[str, Any]) -> list[Target]:
    """Return the targets. If the GPU's peak is unknown, its use cannot be computed, and that target is not
    reached."""
    targets = []
    for engine in _JUDGED:
        mfu = result["engines"][engine]["full_rows"]["mfu"] or 0.0
        targets.append(Target(what=f"{engine}: MFU, full packed rows", measured=mfu, bound=0.45, at_least=True))
    for engine in _JUDGED:
        ratio = result["engines"][engine]["tree_vs_packed"]
        targets.append(Target(what=f"{engine}: tree against packed", measured=ratio, bound=4.0, at_least=True))
    return targets


def step_rows(result: dict[str, Any]) -> list[list[str]]:
    """Return rows of engine, step, seconds, tokens/s, MFU and memory."""
    return [
        [
            engine,
            name.replace("_", " "),
            f"{step['seconds']:.3f}",
            f"{step['tokens'] / step['seconds']:,.0f}",
            "–" if step["mfu"] is None else f"{100 * step['mfu']:.1f}",
            "–" if step["peak_gb"] is None else f"{step['peak_gb']:.1f}",
        ]
        for engine in ENGINES
        for name, step in result["engines"][engine].items()
        if isinstance(step, dict)
    ]


def chunk_rows(result: dict[str, Any]) -> list[list[str]]:
    """Return rows of logits in a chunk, seconds and memory."""
    return [
        [
            f"{int(limit):,}",
            f"{found['seconds']:.4f}",
            "–" if found["peak_gb"] is None else f"{found['peak_gb']:.1f}",
        ]
        for limit, found in result["logprobs"]["by_chunk"].items()
    ]


def shown(result: dict[str, Any]) -> str:
    heads = ["engine", "step", "seconds", "tokens/s", "MFU %", "peak GB"]
    rows = [heads, *step_rows(result), [], ["logits of a chunk", "seconds", "peak GB"], *chunk_rows(result), []]
    lines = ["".join(f"{cell:<20}" for cell in row) for row in rows]
    lines.append(", ".join(f"{name} {value}" for name, value in result["machine"].items()))
    for target in judged(result):
        mark = "reached" if target.reached else "NOT REACHED"
        lines.append(f"{target.what:<40}{target.measured:>8.2f}  ≥ {target.bound}  {mark}")
    return "\n".join(lines)
