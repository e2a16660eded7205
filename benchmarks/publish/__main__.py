"""Bytes, seconds and the trainer's stall of a version: `python -m benchmarks.publish [--sizes 1M 100M 500M]`.

Each version is published by the trainer's publisher, checked by the proxy's inspector, and loaded by an embedded
engine. Beside each, the same bytes are copied and flushed to the same disk. Ratios are of medians in one run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.machine import describe
from benchmarks.publish.models import SHAPES, make_model, take_step
from proxy.contract.identifiers import RunId
from proxy.contract.policy import Head, WeightsReference
from proxy.engines.launch import embedded_plan, wait_until_ready
from proxy.engines.sglang import SglangEngine
from proxy.settings import EngineSettings
from proxy.versions.inspector import WeightsInspector
from trainer.config import DiskWeights
from trainer.publish.disk import DiskPublisher

RESULT = Path(__file__).parents[1] / "results" / "publish.json"
SHORT_SIZES = ("1M",)
LEARNING_RATE = 1e-6


class Timed:
    """Seconds of repeated actions."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}

    def run(self, name: str, action: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        found = action()
        self.seconds.setdefault(name, []).append(time.perf_counter() - began)
        return found

    def median(self, name: str) -> float:
        return statistics.median(self.seconds[name])


def snapshot(weights: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Copy the weights as the loop does before the next step changes them."""
    return {name: weight.to("cpu", dtype, copy=True) for name, weight in weights.items()}


def copy_durably(source: Path, target: Path) -> None:
    """Copy the safetensors files of a version, flushed to the disk."""
    target.mkdir()
    for file in source.glob("*.safetensors"):
        shutil.copyfile(file, target / file.name)
        with (target / file.name).open("rb") as stream:
            os.fsync(stream.fileno())


def is_identical(weights: WeightsReference, tensors: Mapping[str, Tensor]) -> bool:
    """Return whether a version's files hold exactly these tensors."""
    found: dict[str, Tensor] = {}
    for file in sorted(Path(weights.uri).glob("*.safetensors")):
        found |= load_file(file)
    return found.keys() == tensors.keys() and all(
        torch.equal(_bits(found[name]), _bits(tensor)) for name, tensor in tensors.items()
    )


def _bits(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8) if tensor.dim() else tensor


class Measured:
    """Versions that follow each other, each published, copied and served."""

    def __init__(self, publisher: DiskPublisher, model: Path, directory: Path, serve: Callable[[Any], float]) -> None:
        self._publisher = publisher
        self._directory = directory
        self._serve = serve
        self._timed = Timed()
        self._served: list[float] = []
        self._identical = True
        self._bytes = 0
        self._head = Head(run_id=RunId("run_bench"), run_name="bench", version=0, base_model=str(model), weights=None)

    def publish(self, weights: Mapping[str, Tensor]) -> None:
        """Publish the next version, and remove the one before."""
        timed, publisher, head = self._timed, self._publisher, self._head
        tensors = timed.run("snapshot", lambda: snapshot(weights, publisher.dtype or torch.float32))
        staged = timed.run("stage", lambda: publisher.stage(head, tensors, None))
        publisher.settle(staged)
        copied = self._directory / "copy"
        timed.run("copy", lambda: copy_durably(Path(staged.weights.uri), copied))
        shutil.rmtree(copied)
        self._identical = self._identical and is_identical(staged.weights, tensors)
        self._served.append(self._serve(staged.weights))
        self._bytes = staged.weights.bytes
        if head.weights is not None:
            shutil.rmtree(head.weights.uri)
        self._head = msgspec.structs.replace(head, version=head.version + 1, weights=staged.weights)

    def figures(self) -> dict[str, Any]:
        timed = self._timed
        at_once = timed.median("snapshot") + timed.median("stage")
        return {
            "bytes": self._bytes,
            "seconds_to_served": round(timed.median("stage") + statistics.median(self._served), 3),
            "stall_vs_synchronous": round(timed.median("snapshot") / at_once, 3),
            "speed_vs_copy": round(timed.median("copy") / timed.median("stage"), 2),
            "bytes_vs_full": 1.0,
            "bit_identical": self._identical,
            "seconds": {name: round(timed.median(name), 4) for name in timed.seconds},
        }


class Served:
    """An embedded engine and the proxy's check of a version, in front of it."""

    def __init__(self, model: Path, root: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self._plan = embedded_plan(model=str(model), port=port)
        self._model, self._root, self._labels = str(model), root, 0
        self._process = subprocess.Popen(
            self._plan.argv,
            env={**os.environ, **self._plan.env},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def __enter__(self) -> Served:
        asyncio.run(wait_until_ready(self._plan.url, timeout=180, process_alive=lambda: self._process.poll() is None))
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(30)

    def serve(self, weights: WeightsReference) -> float:
        """Return the seconds of the proxy's check and the engine's load."""
        return asyncio.run(self._serve(weights))

    async def _serve(self, weights: WeightsReference) -> float:
        self._labels += 1
        label = f"version-{self._labels}"
        inspector = WeightsInspector(self._root)
        engine = SglangEngine(self._plan.url, EngineSettings(url=self._plan.url))
        try:
            began = time.perf_counter()
            await inspector.check(weights, self._model)
            await engine.load_weights(weights.uri, label)
            if (await engine.info()).weight_label != label:
                raise RuntimeError("the engine does not serve the version that it loaded")
            return time.perf_counter() - began
        finally:
            await engine.aclose()
            await inspector.aclose()


def measure_size(size: str, rounds: int) -> dict[str, dict[str, Any]]:
    """Return the figures of each transport for a model of this size."""
    with tempfile.TemporaryDirectory(prefix="base-rl-publish-") as made:
        directory = Path(made)
        weights = make_model(size, directory / "model")
        found: dict[str, dict[str, Any]] = {}
        with Served(directory / "model", directory) as served:
            for dtype in ("float32", "bfloat16"):
                settings = DiskWeights.model_validate({"directory": directory / "weights", "dtype": dtype})
                publisher = DiskPublisher(settings, directory / "model")
                measured = Measured(publisher, directory / "model", directory, served.serve)
                for number in range(rounds):
                    take_step(weights, LEARNING_RATE, number)
                    measured.publish(weights)
                found[f"disk {dtype}"] = measured.figures()
                print(size, f"disk {dtype}", json.dumps(found[f"disk {dtype}"]), flush=True)
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=tuple(SHAPES), default=list(SHAPES))
    parser.add_argument("--short", action="store_true", help="1M parameters alone, and no result file")
    options = parser.parse_args()
    sizes = SHORT_SIZES if options.short else options.sizes
    result: dict[str, Any] = {}
    for size in sizes:
        for transport, figures in measure_size(size, 2 if options.short else 5).items():
            result.setdefault(transport, {})[size] = figures
    wrong = [
        (name, size)
        for name, sizes_of in result.items()
        for size, each in sizes_of.items()
        if not each["bit_identical"]
    ]
    if wrong:
        raise SystemExit(f"not bit-identical: {wrong}")
    if not options.short:
        RESULT.write_text(json.dumps({"machine": describe(), **result}, indent=2) + "\n")


if __name__ == "__main__":
    main()
