"""The figures of both ways, compared with the targets."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.targets import Target

LEAST_SPEEDUP, MOST_APART = 2.5, 0.02


def summary(sync: Sequence[dict[str, Any]], asynchronous: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return lists with one entry per seed. `speedup` is that of the seconds to a mean reward of 0.9; None if one way
    never reached it."""
    pairs = [(one["seconds_to_090"], other["seconds_to_090"]) for one, other in zip(sync, asynchronous, strict=True)]
    ratios = [before / after for before, after in pairs if before is not None and after is not None]
    return {
        "speedup": round(statistics.median(ratios), 2) if len(ratios) == len(pairs) else None,
        "final_sync": _mean(sync, "final"),
        "final_async": _mean(asynchronous, "final"),
        **{
            name: {"sync": _mean(sync, name), "async": _mean(asynchronous, name)}
            for name in ("trainer_idle_ratio", "engine_idle_ratio", "trajectories_per_second")
        },
        "seeds": {"sync": list(sync), "async": list(asynchronous)},
    }


def judged(result: dict[str, Any]) -> list[Target]:
    """Return the targets. An unknown speedup counts as none."""
    apart = result["final_sync"] - result["final_async"]
    return [
        Target(what="speedup to 0.9", measured=result["speedup"] or 0.0, bound=LEAST_SPEEDUP, at_least=True),
        Target(what="final reward, synchronous − asynchronous", measured=round(apart, 4), bound=MOST_APART),
    ]


def page_rows(result: dict[str, Any]) -> list[list[str]]:
    """Return rows of way, seed, seconds to 0.9, final reward, trajectories/s, versions, and idle shares of trainer
    and engine."""
    return [
        [
            name,
            str(number),
            "–" if found["seconds_to_090"] is None else f"{found['seconds_to_090']:.0f}",
            f"{found['final']:.3f}",
            f"{found['trajectories_per_second']:.1f}",
            str(found["versions"]),
            _share(found["trainer_idle_ratio"]),
            _share(found["engine_idle_ratio"]),
        ]
        for name, way in (("synchronous", "sync"), ("asynchronous", "async"))
        for number, found in enumerate(result["seeds"][way])
    ]


def shown(result: dict[str, Any]) -> str:
    lines = []
    for way, seeds in result["seeds"].items():
        for number, found in enumerate(seeds):
            reached = found["seconds_to_090"]
            told = "0.9 never" if reached is None else f"0.9 after {reached:.0f} s"
            lines.append(
                f"{way:<6} seed {number}: {told}, {found['final']:.2f} at the end after {found['seconds']:.0f} s;"
                f" {found['trajectories_per_second']:.1f} trajectories/s, {found['versions']} versions; idle: trainer"
                f" {_share(found['trainer_idle_ratio'])}, engine {_share(found['engine_idle_ratio'])}"
            )
    return "\n".join(lines)


def verdict(result: dict[str, Any]) -> str:
    return "\n".join(
        f"{'reached' if target.reached else 'NOT REACHED':<12} {target.what}: {target.measured:.2f}"
        f" (target: {target.bound})"
        for target in judged(result)
    )


def _mean(seeds: Sequence[dict[str, Any]], name: str) -> float | None:
    known = [found[name] for found in seeds if found[name] is not None]
    return round(statistics.fmean(known), 4) if known else None


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.0%}"
