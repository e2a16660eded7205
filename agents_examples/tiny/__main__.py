"""Make the checkpoint of an example: `python -m agents_examples.tiny EXAMPLE`."""

from __future__ import annotations

import argparse
import importlib
import time
from pathlib import Path

from agents_examples.tiny.checkpoint import make_checkpoint

EXAMPLES = Path(__file__).parents[1]


def main() -> None:
    examples = sorted(file.parent.name for file in EXAMPLES.glob("*/demonstrations.py"))
    parser = argparse.ArgumentParser(description="Make the tiny checkpoint of an example, in one to three minutes.")
    parser.add_argument("example", choices=examples)
    parser.add_argument("--seed", type=int, default=0, help="of demonstrations and weights (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="directory to write (default: the example's checkpoint/)")
    arguments = parser.parse_args()
    started = time.monotonic()
    recipe = importlib.import_module(f"agents_examples.{arguments.example}.demonstrations").recipe()
    directory = arguments.out or EXAMPLES / arguments.example / "checkpoint"
    make_checkpoint(recipe, directory, seed=arguments.seed)
    print(f"{directory} made in {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
