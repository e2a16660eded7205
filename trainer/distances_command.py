"""`python -m trainer presets [--json]`: how far apart the gradients of the presets are (`trainer/distances.py`)."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence


def main(arguments: Sequence[str]) -> int:
    options = _parser().parse_args(arguments)
    from trainer.distances import distances, gradients, norms

    found = gradients()
    apart, relative = distances(found), norms(found)
    if options.json:
        sys.stdout.write(f"{json.dumps({'distances': apart, 'norms': relative}, indent=2)}\n")
    else:
        sys.stdout.write(f"{table(apart, relative)}\n")
    return 0


def table(apart: Mapping[str, Mapping[str, float]], relative: Mapping[str, float]) -> str:
    """Draw the distances as a Markdown table, each pair once, with the norms in the last column."""
    names = list(apart)
    lines = [["preset", *(f"`{name}`" for name in names[1:]), "norm"]]
    lines.append(["---"] * len(lines[0]))
    for place, name in enumerate(names):
        cells = ["" if other <= place else f"{apart[name][names[other]]:.2g}" for other in range(1, len(names))]
        lines.append([f"`{name}`", *cells, f"{relative[name]:.2g}"])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m trainer presets",
        description="Prints how far apart the gradients of all presets are on one small batch that is always the"
        " same: 1 - cosine of each pair, and norms over grpo's.",
    )
    parser.add_argument("--json", action="store_true", help="as JSON, every digit of it")
    return parser
