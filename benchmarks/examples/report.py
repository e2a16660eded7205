"""The figures of the examples: what is stored, what is judged, and the table that is printed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.examples.run import Measured
from benchmarks.targets import Target

FIRST, LAST, SECONDS = 0.4, 0.8, 180.0
CURVE_ATTEMPTS = 64
"""A point of a stored curve is the mean reward of this many attempts."""


def figures(runs: Sequence[Measured]) -> dict[str, Any]:
    """Return the figures of an example, with one entry per seed."""
    return {
        "first": [round(run.first, 4) for run in runs],
        "last": [round(run.last, 4) for run in runs],
        "seconds": [round(run.seconds, 1) for run in runs],
        "failed_calls": sum(run.failed_calls for run in runs),
        "attempts": [len(run.rewards) for run in runs],
        "curves": [curve(run.rewards) for run in runs],
    }


def curve(rewards: Sequence[float]) -> list[float]:
    """Return the mean reward of each CURVE_ATTEMPTS attempts; a rest that is shorter is left out."""
    whole = len(rewards) // CURVE_ATTEMPTS
    parts = (rewards[part * CURVE_ATTEMPTS : (part + 1) * CURVE_ATTEMPTS] for part in range(whole))
    return [round(sum(part) / CURVE_ATTEMPTS, 4) for part in parts]


def judged(name: str, measured: Mapping[str, Any]) -> list[Target]:
    """Return the targets of an example, each with the worst seed's figure."""
    return [
        Target(what=f"{name}: first reward", measured=max(measured["first"]), bound=FIRST),
        Target(what=f"{name}: last reward", measured=min(measured["last"]), bound=LAST, at_least=True),
        Target(what=f"{name}: seconds", measured=max(measured["seconds"]), bound=SECONDS),
        Target(what=f"{name}: failed calls", measured=measured["failed_calls"], bound=0),
    ]


def page_rows(result: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    """Return the rows of the table of `docs/performance.md`: example, first, last, attempts, seconds, failed."""
    return [
        [
            name,
            _span(each["first"], "{:.2f}"),
            _span(each["last"], "{:.2f}"),
            _span(each["attempts"], "{:,}"),
            _span(each["seconds"], "{:.0f}"),
            str(each["failed_calls"]),
        ]
        for name, each in sorted(result.items())
    ]


def readme_rows(measured: Mapping[str, Any]) -> list[list[str]]:
    """Return the rows of the table in an example's README: seed, first, last, attempts, seconds."""
    return [
        [str(seed), f"{first:.2f}", f"{last:.2f}", f"{attempts:,}", f"{seconds:.0f}"]
        for seed, (first, last, attempts, seconds) in enumerate(
            zip(measured["first"], measured["last"], measured["attempts"], measured["seconds"], strict=True)
        )
    ]


def _span(values: Sequence[float], form: str) -> str:
    low, high = form.format(min(values)), form.format(max(values))
    return low if low == high else f"{low}–{high}"
