"""The gain from asynchrony: `python -m benchmarks.asynchrony [--short]`.

Sessions of an agent whose tools take time (log-normal, with a long tail) are trained in two ways. Synchronous: a
batch of 64 sessions, then a step, then the next batch under the new version (`max_staleness = 0`). Asynchronous: 64
agents work all the time while the trainer trains. Target: a mean reward of 0.9 in 1/2.5 of the time, and a final
reward that is at most 0.02 lower.

Writes `benchmarks/results/async.json` and prints the figures last; the exit status is 0 if the targets were reached.
`--short` makes three batches each, to show that it runs; it writes and judges nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.asynchrony.report import judged, shown, summary, verdict
from benchmarks.asynchrony.run import Work, measure
from benchmarks.machine import describe

RESULT = Path(__file__).parent.parent / "results" / "async.json"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--batches", type=int, default=50, help="of 64 sessions, in each way (default: %(default)s)")
    parser.add_argument(
        "--median", type=float, default=1.0, help="seconds that the tools of a session take (default: 1)"
    )
    parser.add_argument("--sigma", type=float, default=1.0, help="of their logarithm (default: %(default)s)")
    parser.add_argument("--short", action="store_true", help="one seed, three batches; nothing is written")
    options = parser.parse_args()
    found: dict[bool, list[dict[str, Any]]] = {False: [], True: []}
    for seed in range(1 if options.short else options.seeds):
        batches = 3 if options.short else options.batches
        work = Work(seed=seed, batches=batches, median=options.median, sigma=options.sigma)
        for asynchronous, results in found.items():
            print(f"seed {seed}, {'asynchronous' if asynchronous else 'synchronous'}", flush=True)
            with tempfile.TemporaryDirectory(prefix="base-rl-asynchrony-") as directory:
                results.append(asyncio.run(measure(work, asynchronous=asynchronous, data_dir=Path(directory))))
    tools = {"median": options.median, "sigma": options.sigma}
    result = {"machine": describe(), "tools": tools, **summary(found[False], found[True])}
    print(shown(result))
    if options.short:
        return 0
    print(verdict(result))
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    return 0 if all(target.reached for target in judged(result)) else 1


if __name__ == "__main__":
    sys.exit(main())
