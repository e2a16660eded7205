"""The proxy's cost as ratios to an earlier revision's: `python -m benchmarks.proxy.against REVISION`.

Both proxies run with the same interpreter, libraries and scripted engine, each with an engine process and a store of
its own. They are measured in short turns; while one is measured the other is stopped. A ratio compares the two
measurements of one round, moments apart, so that a machine that becomes slower or busier over the whole time changes
both. CPU time is little disturbed by other work on the machine. Latencies are: `--looks one half_load short` measures
them too, for an idle machine. Half load is half of the rate at which the slower of the two was saturated in the
round, the same for both.

Writes `benchmarks/results/proxy-against.json` with the medians of the ratios and their quartiles; the exit status is
0 if the targets were reached. `--short` only shows whether it runs, and writes nothing; nor does `--looks`.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.machine import describe
from benchmarks.proxy import measures, report
from benchmarks.proxy.conversations import LONG_TURNS, SHORT_TURNS
from benchmarks.proxy.measures import Effort
from benchmarks.proxy.systems import BASE_RL, BASE_RL_BEFORE, Bench
from benchmarks.targets import Target

ROOT = Path(__file__).parents[2]
RESULT = ROOT / "benchmarks" / "results" / "proxy-against.json"
FOLDER = Path(".base-rl") / "bench-proxy-against"
CPU_LOOKS = ("short", "long")
LOOKS = (*CPU_LOOKS, "one", "half_load")
SYSTEMS = (BASE_RL_BEFORE, BASE_RL)
FIGURES = {
    "short": ("CPU per call, conversations of 3 turns", "cpu_ms_per_call"),
    "long": (f"CPU per call, conversations of {LONG_TURNS} turns", "cpu_ms_per_call"),
    "one": ("added p50, one connection", "added_p50"),
    "half_load": ("added p99 at half load", "added_p99"),
}
BOUND = 0.8

Round = dict[str, dict[str, dict[str, float]]]
"""The figures of one round by look and system."""


def extract(revision: str, directory: Path, packages: Sequence[str]) -> None:
    """Write the tree of a revision into a directory, and packages into its folder `packages`, without those that they
    need. Raises CalledProcessError for an unknown revision or package."""
    archive = subprocess.run(["git", "archive", revision], cwd=ROOT, check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        files.extractall(directory, filter="data")
    if packages:
        pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps")
        subprocess.run([*pip, "--target", str(directory / "packages"), *packages], check=True, capture_output=True)


async def look(bench: Bench, look_: str, name: str, effort: Effort, *, rate: float, seed: int) -> dict[str, float]:
    """Make one measurement of one system; `rate`, in calls per second, is that of half load."""
    system = bench.systems[name]
    with bench.alone(system):
        await measures.answers_again(system)
        if look_ == "one":
            return await measures.one_at_a_time(system, effort, stream=False)
        if look_ == "half_load":
            return await measures.half_loaded(system, effort, rate=rate, seed=seed)
        return await measures.saturated(system, effort, turns=LONG_TURNS if look_ == "long" else SHORT_TURNS)


async def run(tree: Path, looks: Sequence[str], effort: Effort, rounds: int) -> list[Round]:
    found: list[Round] = []
    with Bench(folder=FOLDER, before=tree) as bench:
        for name in SYSTEMS:
            print(f"starting {name} …", flush=True)
            await measures.check(bench.start(name))
        for round_ in range(rounds):
            # The order changes, because the first system of a round finds other caches than the second.
            order = SYSTEMS if round_ % 2 == 0 else tuple(reversed(SYSTEMS))
            seen: Round = {}
            for each in looks:
                rate = min(figures["calls_per_s"] for figures in seen["short"].values()) / 2 if "short" in seen else 0
                seen[each] = {name: await look(bench, each, name, effort, rate=rate, seed=round_) for name in order}
            found.append(seen)
            print(f"round {round_ + 1} of {rounds}: {ratios([seen])}", flush=True)
    return found


def ratios(rounds: Sequence[Round]) -> dict[str, float]:
    """Return the median over the rounds of this tree's figure divided by the earlier revision's, by look."""
    return {name: round(statistics.median(values), 3) for name, values in _ratios(rounds).items()}


def quartiles(rounds: Sequence[Round]) -> dict[str, list[float]]:
    """Return the first and third quartile of the ratios by look; needs two rounds."""
    found = {name: statistics.quantiles(values, n=4) for name, values in _ratios(rounds).items()}
    return {name: [round(first, 3), round(third, 3)] for name, (first, _, third) in found.items()}


def _ratios(rounds: Sequence[Round]) -> dict[str, list[float]]:
    return {
        look_: [each[look_][BASE_RL][figure] / each[look_][BASE_RL_BEFORE][figure] for each in rounds]
        for look_, (_, figure) in FIGURES.items()
        if look_ in rounds[0]
    }


def medians(rounds: Sequence[Round]) -> dict[str, dict[str, float]]:
    """Return the medians of the figures themselves, in milliseconds, by look and system."""
    return {
        look_: {name: round(statistics.median(each[look_][name][figure] for each in rounds), 3) for name in SYSTEMS}
        for look_, (_, figure) in FIGURES.items()
        if look_ in rounds[0]
    }


def judged(found: dict[str, float]) -> list[Target]:
    return [Target(what=FIGURES[look_][0], measured=ratio, bound=BOUND) for look_, ratio in found.items()]


def page_rows(result: dict[str, Any]) -> list[list[str]]:
    """Return the rows of the table in docs/performance.md: figure, before and after in milliseconds, ratio,
    quartiles."""
    return [
        [
            FIGURES[look_][0],
            *(f"{result['milliseconds'][look_][name]:.2f}" for name in SYSTEMS),
            f"{ratio:.2f}",
            " – ".join(f"{each:.2f}" for each in result["quartiles"][look_]),
        ]
        for look_, ratio in result["ratios"].items()
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("revision", help="the earlier revision, as git names it")
    parser.add_argument(
        "--packages", nargs="+", default=[], help="packages that only the earlier revision needs, with versions"
    )
    parser.add_argument("--looks", nargs="+", choices=LOOKS, default=CPU_LOOKS, help="half_load needs short")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=1.5, help="of one look, about (default %(default)s)")
    parser.add_argument("--short", action="store_true", help="two rounds of 0.3 seconds")
    options = parser.parse_args()
    if "half_load" in options.looks and "short" not in options.looks:
        parser.error("half_load is half of the rate that short finds: add short to --looks")
    if hasattr(os, "sched_setaffinity"):  # whatever is started inherits it
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
    looks = [name for name in LOOKS if name in options.looks]  # short first, because half load needs its rate
    rounds = 2 if options.short else options.rounds
    effort = Effort(seconds=0.3 if options.short else options.seconds, long_clients=8, conversations=0)
    with tempfile.TemporaryDirectory() as tree:
        try:
            extract(options.revision, Path(tree), options.packages)
        except subprocess.CalledProcessError as error:
            parser.error(f"{error.cmd[0]} failed: {error.stderr.decode().strip()}")
        found = uvloop.run(run(Path(tree), looks, effort, rounds))
    result = {
        "revision": options.revision,
        "rounds": rounds,
        "ratios": ratios(found),
        "quartiles": quartiles(found),
        "milliseconds": medians(found),
        "machine": describe(),
    }
    print(json.dumps(result, indent=2))
    targets = judged(result["ratios"])
    print("\n".join(report.verdict(target) for target in targets))
    if options.short or set(looks) != set(CPU_LOOKS):
        return 0
    RESULT.write_text(json.dumps(result, indent=2) + "\n")
    return 0 if all(target.reached for target in targets) else 1


if __name__ == "__main__":
    sys.exit(main())
