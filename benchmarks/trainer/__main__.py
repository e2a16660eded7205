"""The cost of a training step: `python -m benchmarks.trainer [--rounds 3] [--short]`.

Trained tokens per CPU-second on a random Qwen3 of 5.8 million parameters: for sequences padded, packed and as trees,
and for TRL's GRPO step on the same sequences (`systems.py` describes both), on three workloads (`workloads.py`). The
systems alternate: each makes `--rounds` steps after an uncounted first one, and figures are medians. CPU time of the
process is counted, so other load on the machine matters little. If the steps of a workload do not have the same
gradient, there is no figure. Then follows the peak memory of log-probabilities (`memory.py`).

Writes `benchmarks/results/trainer.json`; the exit status is 0 if the targets were reached. `--short` makes one round
on the smallest workload and on two sizes, and writes nothing.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import statistics
import sys
import tempfile
import time
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import describe
from benchmarks.trainer import memory, report
from benchmarks.trainer.systems import Ours, Step, save_model, their_step
from benchmarks.trainer.workloads import WORKLOADS
from trainer.config import Packing

RESULT = Path(__file__).parent.parent / "results" / "trainer.json"
_SEED = 1
_SAME = 1e-3


def measure(steps: dict[str, Step], rounds: int) -> tuple[dict[str, float], dict[str, float]]:
    """Return the median CPU seconds of a step and the norm of its gradient, by system."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    norms: dict[str, float] = {}
    for number in range(rounds + 1):
        for name, step in steps.items():
            began = time.process_time()
            norms[name] = step()
            if number:
                seconds[name].append(time.process_time() - began)
    return {name: statistics.median(each) for name, each in seconds.items()}, norms


def measured(name: str, directory: Path, scratch: Path, rounds: int) -> dict[str, Any]:
    """Return the figures of one workload."""
    make, groups = WORKLOADS[name]
    ours = Ours(directory, make(random.Random(_SEED), groups))
    steps: dict[str, Step] = {packing.value: ours.step(packing) for packing in Packing}
    steps["trl"] = their_step(directory, ours.workload, scratch)
    seconds, norms = measure(steps, rounds)
    if max(norms.values()) > (1 + _SAME) * min(norms.values()):
        raise AssertionError(f"{name}: the systems did not do the same, norms of the gradient are {norms}")
    print(f"{name}: " + ", ".join(f"{system} {value:.2f} s" for system, value in seconds.items()), flush=True)
    return {"trained_tokens": ours.trained_tokens, "cpu_s": seconds, "gradient_norm": norms}


def result_of(parameters: int, rounds: int, by_workload: dict[str, Any], peaks: dict[str, Any]) -> dict[str, Any]:
    rates: dict[str, dict[str, float]] = {
        system: {
            name: round(found["trained_tokens"] / found["cpu_s"][system], 1) for name, found in by_workload.items()
        }
        for system in report.SYSTEMS
    }

    def ratio(workload: str, system: str, other: str) -> float:
        return round(rates[system][workload] / rates[other][workload], 3)

    return {
        "machine": describe(),
        "parameters": parameters,
        "threads": torch.get_num_threads(),
        "rounds": rounds,
        "trl": version("trl"),
        "tokens_per_cpu_s": rates,
        "packed_vs_trl": ratio("single_turn", "packed", "trl"),
        "tree_vs_packed": ratio("shared_prefix", "tree", "packed"),
        "peak_mb": peaks,
        "workloads": by_workload,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="of each system (default: %(default)s)")
    parser.add_argument("--short", action="store_true", help="does it run? nothing is written and nothing is judged")
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # warnings of TRL and the libraries below it about their own defaults
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    names = ["shared_prefix"] if options.short else list(WORKLOADS)
    sizes, whole = (memory.SIZES[:2], memory.WHOLE[:1]) if options.short else (memory.SIZES, memory.WHOLE)
    with tempfile.TemporaryDirectory(prefix="base-rl-trainer-") as scratch:
        directory = Path(scratch) / "model"
        parameters = save_model(directory)
        by_workload = {
            name: measured(name, directory, Path(scratch), 1 if options.short else options.rounds) for name in names
        }
    peaks = {
        how: {f"{vocabulary} x {tokens}": memory.peak_mb(vocabulary, tokens, how) for vocabulary, tokens in some}
        for how, some in (("chunked", sizes), ("whole", whole))
    }
    if options.short:
        print(json.dumps({"cpu_s": by_workload, "peak_mb": peaks}, indent=2))
        return 0
    result = result_of(parameters, options.rounds, by_workload, peaks)
    RESULT.write_text(json.dumps(result, indent=2) + "\n")
    print(report.shown(result))
    return 0 if all(target.reached for target in report.judged(result)) else 1


if __name__ == "__main__":
    sys.exit(main())
