"""The examples, each on its tiny model: `python -m benchmarks.examples [NAME …]`, `make example` and `make examples`.

Without options: every example, or the named ones, with three seeds. Targets, for every seed on two idle cores: first
reward ≤ 0.4, last ≥ 0.8, under 180 seconds from the start of the stack, no failed call. A run ends as soon as the
mean reward of its last 128 attempts is 0.9, or after 170 seconds. Writes `benchmarks/results/examples.json` and
`docs/images/example-NAME.svg`; the exit status says whether the targets were reached. The figures of examples that
are not named stay in the file.

`--seed N` runs one seed, prints its figures and writes nothing (`make example NAME=…`). `--short` makes some attempts
with one seed, to show that the examples run: it judges and writes nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.examples.report import figures, judged, page_rows, readme_rows
from benchmarks.examples.run import WINDOW, Bounds, ExampleFailed, Measured, names, run
from benchmarks.machine import describe
from benchmarks.targets import target_rows

RESULT = Path(__file__).parents[1] / "results" / "examples.json"
SEEDS = (0, 1, 2)
SHORT_ATTEMPTS = 64


def main() -> int:
    known = names()
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.examples",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(known)}; default: all")
    parser.add_argument("--seed", type=int, help="run this seed alone; write nothing")
    parser.add_argument("--seconds", type=float, default=Bounds().seconds, help="bound of a run (%(default)g)")
    parser.add_argument("--attempts", type=int, default=Bounds().attempts, help="bound of a run (%(default)d)")
    parser.add_argument("--short", action="store_true", help="some attempts with one seed; judge and write nothing")
    options = parser.parse_args()
    if unknown := sorted(set(options.names) - set(known)):
        parser.error(f"there is no example {unknown[0]!r}; there are {', '.join(known)}")
    bounds = Bounds(seconds=options.seconds, attempts=options.attempts)
    alone = options.short or options.seed is not None
    seeds = (options.seed or 0,) if alone else SEEDS
    if options.short:
        bounds = replace(bounds, attempts=SHORT_ATTEMPTS)
    runs: dict[str, list[Measured]] = {}
    try:
        for name in options.names or known:
            for seed in seeds:
                for part, measured in _run(name, seed, bounds).items():
                    runs.setdefault(part, []).append(measured)
    except ExampleFailed as error:
        raise SystemExit(f"error: {error}") from error
    return 0 if alone else _write({name: {**figures(own), "machine": describe()} for name, own in runs.items()})


def _run(name: str, seed: int, bounds: Bounds) -> dict[str, Measured]:
    """Run an example and print its figures."""
    print(f"{name}, seed {seed}: at most {bounds.seconds:g} seconds", flush=True)
    parts = run(name, seed=seed, bounds=bounds)
    for part, measured in parts.items():
        print(
            f"{part}, seed {seed}: mean reward of the first {WINDOW} attempts {measured.first:.2f}, of the last "
            f"{measured.last:.2f}; {len(measured.rewards)} attempts in {measured.seconds:.0f} s, "
            f"{measured.failed_calls} failed calls\n",
            flush=True,
        )
    return parts


def _write(measured: dict[str, Any]) -> int:
    """Store the figures and the plots, and print what was judged."""
    from benchmarks.examples.plot import draw

    before = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    result = dict(sorted({**before, **measured}.items()))
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    for name, each in measured.items():
        draw(name, each)
        print(
            f"for the README of {name}, with the date {each['machine']['date']} and {each['machine']['processor']}:"
        )
        _print_table(["seed", "first 128", "last 128", "attempts", "seconds"], readme_rows(each))
    targets = [target for name, each in measured.items() for target in judged(name, each)]
    _print_table(["example", "first", "last", "attempts", "seconds", "failed"], page_rows(result))
    _print_table(["target", "bound", "worst seed"], target_rows(targets))
    return 0 if all(target.reached for target in targets) else 1


def _print_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    print("\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *rows]), end="\n\n", flush=True)


if __name__ == "__main__":
    sys.exit(main())
