"""What a training step takes on one GPU: `python -m benchmarks.gpu [--rounds 3] [--output FILE] [--short]`.

A random model in the shape of Qwen3-0.6B, made on the spot, in bfloat16, by both engines, archon's layers
compiled and not:

- full rows: packed rows of 4,096 tokens without a gap, of sessions of 2,048, 1,024 and 512 tokens;
- whole rows: sessions of 4,096 tokens each;
- packed, tree: prompts of 512 tokens with eight answers of 64 each, every answer behind its prompt in a packed row,
  and with each prompt once; whole mask: the latter with SDPA under a whole mask in the place of flex_attention.

Of each the median of `--rounds` steps after one that is not counted: seconds of the update alone (forward, backward,
clipping, AdamW), model FLOPs utilisation as `trainer/observe/utilisation.py` counts it, and the most memory that
tensors took. Then the seconds and the memory of log-probabilities by how many logits are computed at a time.

Writes `benchmarks/results/gpu.json`; exit status 0: the targets were reached, 1: not, 2: there is no GPU. `--short`
is a rehearsal on a tiny model, also on a CPU (`--device cpu`): it writes nothing and judges nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import report
from benchmarks.gpu.steps import (
    QWEN3_0_6B,
    TINY,
    Engine,
    Size,
    branches,
    chunked,
    device_name,
    full_rows,
    same_gradient,
    save_model,
    whole_rows,
)
from benchmarks.machine import describe
from trainer.config import Packing

RESULT = Path(__file__).parent.parent / "results" / "gpu.json"
_SAME = 0.05
"""Largest relative difference between gradients in bfloat16 that are summed in different orders."""


def measured(directory: Path, label: str, device: torch.device, size: Size, rounds: int) -> dict[str, Any]:
    """Return the figures of all steps of one engine."""
    options = report.ENGINES[label]
    engine = Engine(directory, device, size, **options)
    found: dict[str, Any] = {"by_blocks": engine.by_blocks}
    for name, workload, packing in (
        ("full_rows", full_rows(size), Packing.PACKED),
        ("whole_rows", whole_rows(size), Packing.PACKED),
        ("packed", branches(size), Packing.PACKED),
        ("tree", branches(size), Packing.TREE),
    ):
        found[name] = told(label, name, engine.step(workload, packing, rounds))
    del engine
    dense = Engine(directory, device, size, **options, attention="whole")
    found["whole_mask"] = told(label, "whole_mask", dense.step(branches(size), Packing.TREE, rounds))
    if not same_gradient([found[name] for name in ("packed", "tree", "whole_mask")], _SAME):
        raise AssertionError(f"{label}: the layouts did not do the same: {found}")
    found["tree_vs_packed"] = round(found["packed"]["seconds"] / found["tree"]["seconds"], 3)
    found["tree_vs_packed_of_arithmetic"] = round(found["packed"]["tflop"] / max(found["tree"]["tflop"], 1e-9), 3)
    return found


def told(label: str, name: str, step: dict[str, Any]) -> dict[str, Any]:
    print(f"{label}, {name}: {step}", flush=True)
    return step


def machine(device: torch.device) -> dict[str, Any]:
    about = {**describe(), "gpu": device_name(device), "cuda": torch.version.cuda}
    if device.type == "cuda":
        about["gpu_memory_gb"] = round(torch.cuda.get_device_properties(device).total_memory / 1e9, 1)
        about["triton"] = version("triton")
    return about


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="steps of each kind (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=RESULT, help="where the figures go (default: %(default)s)")
    parser.add_argument("--short", action="store_true", help="does it run? nothing is written and nothing is judged")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: with --short alone")
    options = parser.parse_args(arguments)
    if options.device == "cpu" and not options.short:
        parser.error("figures of a CPU are those of `make bench-trainer`; write --short to see whether this runs")
    if options.device == "cuda" and not torch.cuda.is_available():
        print("torch finds no CUDA device: nothing is measured (docs/gpu.md says what is needed)", file=sys.stderr)
        return 2
    device = torch.device(options.device, 0) if options.device == "cuda" else torch.device("cpu")
    size, rounds = (TINY, 1) if options.short else (QWEN3_0_6B, options.rounds)
    with tempfile.TemporaryDirectory(prefix="base-rl-gpu-") as scratch:
        directory = Path(scratch) / "model"
        parameters = save_model(size, directory, device)
        engines = {label: measured(directory, label, device, size, rounds) for label in report.ENGINES}
    vocabulary, tokens = size.head
    result = {
        "machine": machine(device),
        "model": {**size.model, "parameters": parameters},
        "precision": "bfloat16",
        "rounds": rounds,
        "engines": engines,
        "logprobs": {"vocabulary": vocabulary, "tokens": tokens, "by_chunk": chunked(size, device, rounds)},
    }
    if options.short:
        print(json.dumps(result, indent=2))
        return 0
    options.output.write_text(json.dumps(result, indent=2) + "\n")
    print(report.shown(result))
    return 0 if all(target.reached for target in report.judged(result)) else 1


if __name__ == "__main__":
    sys.exit(main())
