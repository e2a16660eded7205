"""The figures of all parts as the result file has them, compared with the targets."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from benchmarks.runs.parts import Part
from benchmarks.targets import Target, target_rows

LEAST_OWN, MOST_OTHER = 0.85, 0.15
LEAST_RATE, MOST_MEMORY = 0.8, 1.5

Measured = Mapping[Part, Mapping[str, Any]]


def summary(measured: Measured) -> dict[str, Any]:
    """Return the figures of one engine.

    Ratios compare the runs together with each run alone, doing the same work. A rate alone is that of all the single
    runs' sessions in the sum of their times; memory alone is the median.
    """
    together = next(found for part, found in measured.items() if len(part.runs) > 1)
    alone = [found for part, found in measured.items() if len(part.runs) == 1 and part.weights == "adapter"]
    full = [found for part, found in measured.items() if len(part.runs) == 1 and part.weights == "full"]
    rate_alone = sum(each["sessions"] for each in alone) / sum(each["seconds"] for each in alone)
    rewards: dict[str, dict[str, float]] = together["rewards"]
    others = {run: {rule: reward for rule, reward in found.items() if rule != run} for run, found in rewards.items()}
    return {
        "own_reward": [found[run] for run, found in rewards.items()],
        "highest_other_reward": max(max(each.values()) for each in others.values()),
        "trajectories_per_s_vs_one": round(together["trajectories_per_s"] / rate_alone, 3),
        "memory_vs_one": round(together["memory_mib"] / statistics.median(each["memory_mib"] for each in alone), 3),
        "wall_vs_one_after_another": round(together["wall"] / sum(each["wall"] for each in full), 3),
        "failed_calls": sum(each["failed"] for each in measured.values()),
        "parts": {part.name: dict(found) for part, found in measured.items()},
    }


def judged(engine: str, figures: Mapping[str, Any]) -> list[Target]:
    rows = (
        ("lowest own reward", min(figures["own_reward"]), LEAST_OWN, True),
        ("highest reward by another run's rule", figures["highest_other_reward"], MOST_OTHER, False),
        ("trajectories/s, compared with one run", figures["trajectories_per_s_vs_one"], LEAST_RATE, True),
        ("memory, compared with one run", figures["memory_vs_one"], MOST_MEMORY, False),
        ("failed calls", figures["failed_calls"], 0, False),
    )
    return [
        Target(what=f"{engine}: {what}", measured=measured, bound=bound, at_least=at_least)
        for what, measured, bound, at_least in rows
    ]


def page_rows(figures: Mapping[str, Any]) -> list[list[str]]:
    """Return rows of run, own reward, highest reward by another run's rule, versions and highest staleness."""
    together = next(iter(figures["parts"].values()))
    return [
        [
            run,
            f"{found[run]:.2f}",
            f"{max(reward for rule, reward in found.items() if rule != run):.2f}",
            str(together["runs"][run]["versions"]),
            f"{together['runs'][run]['staleness_max']:.0f}",
        ]
        for run, found in together["rewards"].items()
    ]


def ratio_rows(engine: str, figures: Mapping[str, Any]) -> list[list[str]]:
    """Return rows of part, trajectories per second, seconds with the start, MiB, and CPU milliseconds per trajectory.
    Runs that are measured one after another are one row, with the sum of their seconds."""
    parts = list(figures["parts"].items())
    groups = {
        f"{engine}, {len(figures['own_reward'])} runs together": [parts[0][1]],
        f"{engine}, one after another": [found for name, found in parts[1:] if ", adapter, " in name],
        f"{engine}, one after another, whole weights": [found for name, found in parts[1:] if ", full, " in name],
    }
    return [
        [
            name,
            f"{sum(each['sessions'] for each in found) / sum(each['seconds'] for each in found):.1f}",
            f"{sum(each['wall'] for each in found):.0f}",
            f"{statistics.median(each['memory_mib'] for each in found):.0f}",
            f"{statistics.fmean(sum(each['cpu_ms_per_trajectory'].values()) for each in found):.1f}",
        ]
        for name, found in groups.items()
    ]


def page(result: Mapping[str, Any]) -> str:
    """Return the section "Many runs" of docs/performance.md in Markdown."""
    engines = [engine for engine in result if engine != "machine"]
    learnt = [[engine, *row] for engine in engines for row in page_rows(result[engine])]
    costs = [row for engine in engines for row in ratio_rows(engine, result[engine])]
    targets = target_rows([target for engine in engines for target in judged(engine, result[engine])])
    tables = (
        (["engine", "run", "own reward", "highest by another rule", "versions", "staleness, at most"], learnt),
        (["runs", "trajectories/s", "seconds", "MiB", "CPU ms"], costs),
        (["target", "bound", "measured"], targets),
    )
    learnt_table, costs_table, targets_table = (_markdown(heading, rows) for heading, rows in tables)
    walls = ", ".join(f"{result[engine]['wall_vs_one_after_another']:.2f} ({engine})" for engine in engines)
    return f"""\
## Many runs

Runs of the calculator over one base model learn at the same time, each a LoRA adapter of rank 16 with another reward
rule, of which at most one rewards any answer: to use the tool, to break its call, or to guess a number of a certain
length. One engine serves all of them, one trainer (`--runs all`) trains them, and one proxy is between them, on
two cores of an {result["machine"]["processor"]}, on {result["machine"]["date"]}: `make bench-runs`. Every run
completes 1,280 sessions, 64 at a time; then 128 new sessions are scored by the rules of all runs, and not trained.

{learnt_table}

The same runs do the same work one after another, each with an engine, a proxy and a trainer of its own, as adapters
and with whole weights. Seconds include the starts. MiB is the most resident memory of engine and trainer together, of
single runs the median. CPU time is that of engine, proxy, trainer and agents per trajectory.

{costs_table}

{targets_table}

The runs together take this share of the time that they take one after another with whole weights: {walls}.
"""


def _markdown(heading: list[str], rows: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [heading, ["---"] * len(heading), *rows])


def shown(name: str, found: Mapping[str, Any]) -> str:
    own = ", ".join(f"{run} {rewards[run]:.2f}" for run, rewards in found["rewards"].items())
    return (
        f"{name}: {found['trajectories_per_s']:.1f} trajectories/s, {found['seconds']:.0f} s"
        f" ({found['wall']:.0f} s with the start), {found['memory_mib']:.0f} MiB, {found['failed']} failed;"
        f" own reward: {own}"
    )


def verdict(result: Mapping[str, Any], engines: tuple[str, ...]) -> str:
    return "\n".join(
        f"{'reached' if target.reached else 'NOT REACHED':<12} {target.what}: {target.measured:.2f}"
        f" (target: {'at least' if target.at_least else 'at most'} {target.bound:g})"
        for engine in engines
        if engine in result
        for target in judged(engine, result[engine])
    )
