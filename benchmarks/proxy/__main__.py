"""The cost of the proxy, compared with LiteLLM and rllm-model-gateway: `python -m benchmarks.proxy`, or `make
bench-proxy`.

The scripted engine without delay, the load generator and the proxies share the same two cores. base-rl commits every
turn before its answer is complete. Writes `benchmarks/results/proxy.json` and prints the figures last; the exit
status is 0 if the targets were reached.

`--systems base_rl base_rl_many --looks short` measures a part, here the cost of many runs in the store,
and writes nothing; `--short` only shows whether it runs;
`--profile` also records a profile of base-rl's proxy.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import sys
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.machine import describe
from benchmarks.proxy import measures, report
from benchmarks.proxy.conversations import LONG_TURNS
from benchmarks.proxy.environments import LITELLM, RLLM_GATEWAY
from benchmarks.proxy.measures import Effort
from benchmarks.proxy.profile import Profiler
from benchmarks.proxy.systems import BASE_RL, BASE_RL_FSYNC, BASE_RL_MANY, LITELLM_NAME, RLLM_NAME, Bench, System

RESULT = Path(__file__).parents[1] / "results" / "proxy.json"
FOLDER = Path(".base-rl") / "bench-proxy"
ALL = (BASE_RL, RLLM_NAME, LITELLM_NAME, BASE_RL_FSYNC, BASE_RL_MANY)
LOOKS = ("one", "first_token", "short", "long", "half_load", "turns")
FULL = Effort(seconds=4.0, long_clients=8, conversations=40)
SHORT = Effort(seconds=0.3, long_clients=2, conversations=2)


async def look(bench: Bench, system: System, looks: tuple[str, ...], effort: Effort, round_: int) -> dict[str, Any]:
    """Measure one round of one system. Half load is half of the rate that the same round found at saturation."""
    seen: dict[str, Any] = {}
    with bench.alone(system):
        await measures.answers_again(system)
        if "one" in looks:
            seen["one"] = await measures.one_at_a_time(system, effort, stream=False)
        if "first_token" in looks:
            seen["first_token"] = await measures.one_at_a_time(system, effort, stream=True)
        if "short" in looks or "half_load" in looks:
            seen["short"] = await measures.saturated(system, effort)
        if "long" in looks:
            seen["long"] = await measures.saturated(system, effort, turns=LONG_TURNS)
        if "half_load" in looks:
            rate = seen["short"]["calls_per_s"] / 2
            seen["half_load"] = await measures.half_loaded(system, effort, rate=rate, seed=round_)
        if "turns" in looks and system.name == BASE_RL:
            seen["turns"] = await measures.turn_costs(system, effort)
    return seen


async def run(
    names: tuple[str, ...],
    looks: tuple[str, ...],
    effort: Effort,
    rounds: int,
    profiler: Profiler | None,
    runs: int,
) -> dict[str, Any]:
    """Return figures by system: medians over the rounds. Every round measures every system."""
    seen: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    with Bench(folder=FOLDER, runs=runs) as bench:
        for name in names:
            print(f"starting {name} …", flush=True)
            await measures.check(bench.start(name))
        if profiler is not None:
            profiler.begin(bench.systems[BASE_RL if BASE_RL in names else BASE_RL_MANY].measured)
        for round_ in range(rounds):
            for name in (
                names if round_ % 2 == 0 else reversed(names)
            ):  # rotate the order: the first system of a round finds different caches
                found = await look(bench, bench.systems[name], looks, effort, round_)
                seen[name].append(found)
                print(f"round {round_ + 1} of {rounds}: {report.line(name, found)}", flush=True)
        if profiler is not None:
            profiler.end()
    if BASE_RL in seen and BASE_RL_MANY in seen and "short" in seen[BASE_RL][0]:
        # Within each round, in which they are measured moments apart: a machine changes more over the whole time.
        for one, many in zip(seen[BASE_RL], seen[BASE_RL_MANY], strict=True):
            many["short"]["calls_per_s_vs_one"] = many["short"]["calls_per_s"] / one["short"]["calls_per_s"]
            many["short"]["cpu_vs_one"] = many["short"]["cpu_ms_per_call"] / one["short"]["cpu_ms_per_call"]
    return {name: summary(found) for name, found in seen.items()}


def summary(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the median of every figure over the rounds."""
    result: dict[str, Any] = {}
    for key, first in rounds[0].items():
        if isinstance(first, dict):
            result[key] = {name: statistics.median(each[key][name] for each in rounds) for name in first}
        else:
            result[key] = [statistics.median(values) for values in zip(*(each[key] for each in rounds), strict=True)]
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--systems", nargs="+", choices=ALL, default=list(ALL))
    parser.add_argument("--looks", nargs="+", choices=LOOKS, default=list(LOOKS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--seconds", type=float, default=FULL.seconds, help="of one look, about (default %(default)s)"
    )
    parser.add_argument("--runs", type=int, default=200, help=f"in the store of {BASE_RL_MANY} (default %(default)s)")
    parser.add_argument("--short", action="store_true", help="base-rl alone, one round, seconds")
    parser.add_argument("--profile", action="store_true", help=f"profile base-rl's proxy into {FOLDER}/profile.txt")
    options = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):  # whatever is started inherits it
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
    names = (BASE_RL,) if options.short else tuple(dict.fromkeys(options.systems))
    rounds = 1 if options.short else options.rounds
    profiler = Profiler(FOLDER) if options.profile else None
    effort = SHORT if options.short else dataclasses.replace(FULL, seconds=options.seconds)
    looks = tuple(options.looks)
    try:
        figures = uvloop.run(run(names, looks, effort, rounds, profiler, options.runs))
    except BlockingIOError:
        print(f"another benchmark uses {FOLDER}; two at once would measure each other", file=sys.stderr)
        return 1
    if profiler is not None:
        print(profiler.report())
    if set(names) != set(ALL) or set(looks) != set(LOOKS):
        print(report.table(figures))
        if (ratio := figures.get(BASE_RL_MANY, {}).get("short", {}).get("calls_per_s_vs_one")) is not None:
            print(
                f"{report.verdict(report.many_runs(ratio))}; CPU {figures[BASE_RL_MANY]['short']['cpu_vs_one']:.2f} x"
            )
        return 0
    versions = {LITELLM_NAME: LITELLM.version("litellm"), RLLM_NAME: RLLM_GATEWAY.version("rllm-model-gateway")}
    result = {
        "machine": describe(),
        "rounds": rounds,
        "runs": options.runs,
        "versions": versions,
        **report.headline(figures),
    }
    result = report.rounded(result)
    RESULT.write_text(json.dumps(result, indent=2) + "\n")
    print(f"\nfor docs/performance.md:\n\n{report.page(result)}\n")
    print(report.table(figures))
    print(report.targets(result))
    return 0 if all(target.reached for target in report.judged(result)) else 1


if __name__ == "__main__":
    sys.exit(main())
