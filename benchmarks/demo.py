"""The demo with several seeds: `python benchmarks/demo.py [--seeds 5] [--engine embedded]`.

Target, on two idle cores: first reward ≤ 0.35, last ≥ 0.90, at least 8 versions swapped in, no failed call, under 120
seconds from the command to the end, in every seed. Writes `benchmarks/results/demo.json` (`demo-sglang.json`) and
prints the figures last; the exit status says whether the target was reached.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.machine import describe

RESULTS = Path(__file__).parent / "results"
TARGET = {"first_reward": 0.35, "last_reward": 0.90, "versions": 8, "failed_calls": 0, "seconds": 120.0}


def run(engine: str, seed: int, folder: Path) -> dict[str, Any]:
    """Run one demo in a data directory of its own, and return its summary."""
    command = [sys.executable, "-m", "proxy.cli", "demo", "--plain", "--engine", engine, "--seed", str(seed)]
    subprocess.run([*command, "--data-dir", str(folder)], check=False)
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return {"seed": seed, **summary}


def reached(summary: dict[str, Any]) -> bool:
    return bool(
        summary["first_reward"] <= TARGET["first_reward"]
        and summary["last_reward"] >= TARGET["last_reward"]
        and summary["swaps"] >= TARGET["versions"]
        and summary["failed_calls"] <= TARGET["failed_calls"]
        and summary["seconds"] < TARGET["seconds"]
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--engine", choices=["embedded", "sglang"], default="embedded")
    options = parser.parse_args()
    summaries = [
        run(options.engine, seed, Path(".base-rl") / f"bench-{options.engine}-{seed}")
        for seed in range(options.seeds)
    ]
    result = {
        "machine": describe(),
        "target": TARGET,
        "reached": sum(map(reached, summaries)),
        "median_seconds": statistics.median(summary["seconds"] for summary in summaries),
        "seeds": summaries,
    }
    name = "demo.json" if options.engine == "embedded" else f"demo-{options.engine}.json"
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / name).write_text(json.dumps(result, indent=2) + "\n")
    for summary in summaries:
        print(
            f"seed {summary['seed']}: {summary['first_reward']:.2f} -> {summary['last_reward']:.2f} in "
            f"{summary['seconds']:.0f} s, {summary['swaps']} swaps, {summary['turns']} calls, "
            f"{summary['failed_calls']} failed, staleness at most {summary['max_staleness']}"
        )
    print(f"target reached by {result['reached']} of {options.seeds} seeds; median {result['median_seconds']:.0f} s")
    return 0 if result["reached"] == options.seeds else 1


if __name__ == "__main__":
    sys.exit(main())
