"""Makes the checkpoint in `checkpoint/`: a tokenizer and a tiny Qwen3 that has seen calculators used well and badly.

    OMP_NUM_THREADS=1 python -m agents_examples.calculator.make_checkpoint

`agents_examples/tiny/checkpoint.py` says how. 200 steps on right demonstrations teach it to copy operands and
results, then 100 on a mediocre mixture bury that ability under bad habits (`demonstrations.py`). At the end it prints
the reward that the model starts from, sampled and greedy, over 512 problems.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from agents_examples.calculator.demonstrations import recipe
from agents_examples.calculator.sampling import measure
from agents_examples.tiny.checkpoint import make_checkpoint


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the calculator's checkpoint. Takes one to three minutes.")
    parser.add_argument("--seed", type=int, default=0, help="of demonstrations and weights (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "checkpoint", help="directory to write")
    arguments = parser.parse_args()
    started = time.monotonic()
    stored = make_checkpoint(recipe(), arguments.out, seed=arguments.seed)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(arguments.out)
    for temperature in (1.0, 0.0):
        result = measure(stored, tokenizer, temperature=temperature)
        print(
            f"temperature {temperature:.0f}: reward {result.mean_reward:.3f}, answers of {result.mean_length:.1f} "
            f"tokens, at most {result.longest}; most often {result.commonest!r}"
        )
    print(f"{arguments.out} made in {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
