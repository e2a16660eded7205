"""Bytes, seconds and the trainer's stall of a version: `python -m benchmarks.publish [--sizes 1M 100M 500M]`.

Each version is published by the trainer's publisher, checked by the proxy's inspector, and loaded by an embedded
engine. Beside each, its whole files are copied within the same file system and flushed: the disk, or shared memory
for `tensors`. Ratios are of medians in one run. The trainer's stall, which is to copy the weights, is compared with
the time in which a version with the optimiser's state, all in float32, is written to the disk; once it includes
copying that state. The speed of writing until engines can read is compared with that of copying. `s3` writes to a
server on this machine, and an inspector that sees nothing of the trainer's disk fetches from there. With `collective`
the engine receives the weights, and its speed is that from the offer to the engine's serving. Versions follow each
other by steps of GRPO at a learning rate of 1e-6, for 500M parameters by random moves.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.machine import describe
from benchmarks.publish import report
from benchmarks.publish.measuring import Measured, synchronous_write
from benchmarks.publish.models import SHAPES, Moved, Trained, model_of
from benchmarks.publish.serving import BUCKET, Served, object_store
from proxy.contract.memory import default_memory_directory
from trainer.config import CollectiveWeights, DeltaWeights, DiskWeights, SharedDirectory, TensorsWeights

RESULT = Path(__file__).parents[1] / "results" / "publish.json"
SHORT_SIZES = ("1M",)
LEARNING_RATES = (1e-6, 1e-5, 1e-4)


def transports(disk: Path, memory: Path) -> Iterator[tuple[str, SharedDirectory]]:
    """Yield the transports by name, those of the disk before others of their precision."""
    for dtype in ("float32", "bfloat16"):
        shared = {"dtype": dtype, "directory": disk}
        yield f"disk {dtype}", DiskWeights.model_validate(shared)
        yield f"tensors {dtype}", TensorsWeights.model_validate({**shared, "memory_directory": memory})
        yield f"collective {dtype}", CollectiveWeights.model_validate(shared)
    yield "delta bfloat16", DeltaWeights.model_validate({**shared, "full_every": 1000})
    yield "s3 bfloat16", DiskWeights.model_validate({**shared, "url": f"s3://{BUCKET}/bench"})


def measure_size(size: str, rounds: int) -> dict[str, dict[str, Any]]:
    """Return the figures of each transport for a model of this size."""
    found: dict[str, dict[str, Any]] = {}
    with (
        tempfile.TemporaryDirectory(prefix="base-rl-publish-") as made,
        tempfile.TemporaryDirectory(prefix="base-rl-publish-", dir=default_memory_directory().parent) as memory,
        object_store(),
    ):
        directory = Path(made)
        model = model_of(size, directory / "model")
        with Served(directory / "model", directory) as served:
            at_once = synchronous_write(model.weights(), directory / "model", directory, rounds)
            for transport, settings in transports(directory / "weights", Path(memory)):
                measured = Measured(settings, directory / "model", directory, served, at_once)
                model.at(LEARNING_RATES[0])
                measured.publish(model.weights(), counts=False)
                for _ in range(rounds):
                    model.step()
                    measured.publish(model.weights())
                found[transport] = measured.figures()
                if isinstance(settings, DeltaWeights):
                    found[transport]["bytes_vs_full_by_learning_rate"] = by_learning_rate(model, measured)
                print(size, transport, json.dumps(found[transport]), flush=True)
                measured.close()
                shutil.rmtree(directory / "weights")
    return found


def by_learning_rate(model: Trained | Moved, measured: Measured) -> dict[str, float]:
    """Return the stored bytes of a version, by those of whole files, after a step at each rate."""
    found = {}
    for rate in LEARNING_RATES:
        model.at(rate)
        measured.publish(model.weights(), counts=False)
        model.step()
        found[f"{rate:g}"] = round(measured.publish(model.weights(), counts=False), 4)
    return found


def main() -> int:
    """Measure the sizes, write their results beside those of the others, and return 1 if a target was missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--sizes", nargs="+", choices=tuple(SHAPES), default=list(SHAPES), help="the others keep their results"
    )
    parser.add_argument("--short", action="store_true", help="1M parameters alone; writes and judges nothing")
    options = parser.parse_args()
    stored = json.loads(RESULT.read_text()) if RESULT.exists() and not options.short else {}
    result: dict[str, Any] = {name: figures for name, figures in stored.items() if name != "machine"}
    for size in SHORT_SIZES if options.short else options.sizes:
        for transport, figures in measure_size(size, 1 if options.short else 5).items():
            result.setdefault(transport, {})[size] = figures
    if wrong := report.not_identical(result):
        print(f"not bit-identical: {', '.join(wrong)}", file=sys.stderr)
        return 1
    if options.short:
        return 0
    result["machine"] = describe()
    RESULT.write_text(json.dumps(result, indent=2) + "\n")
    print(report.page(result))
    return 0 if all(target.reached for target in report.judged(result)) else 1


if __name__ == "__main__":
    sys.exit(main())
