"""Bytes, seconds and the trainer's stall of a version: `python -m benchmarks.publish [--sizes 1M 100M 500M]`.

Each version is published by the trainer's publisher, checked by the proxy's inspector, and loaded by an embedded
engine. Beside each, its whole files are copied and flushed to the same disk. Ratios are of medians in one run: the
trainer's stall to the time that publishing the whole version at once takes, and the speed of writing to that of
copying. Versions follow each other by steps of GRPO at a learning rate of 1e-6, for 500M parameters by random moves.
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
from benchmarks.publish.models import SHAPES, Moved, Trained, model_of
from proxy.contract.delta import DELTA_INDEX, is_delta
from proxy.contract.identifiers import RunId
from proxy.contract.policy import Head, WeightsReference
from proxy.engines.launch import embedded_plan, wait_until_ready
from proxy.engines.sglang import SglangEngine
from proxy.settings import EngineSettings
from proxy.versions.inspector import WeightsInspector
from trainer.config import DeltaWeights, DiskWeights
from trainer.publish.publisher import WeightPublisher
from trainer.publish.transports import publisher_of

RESULT = Path(__file__).parents[1] / "results" / "publish.json"
SHORT_SIZES = ("1M",)
LEARNING_RATES = (1e-6, 1e-5, 1e-4)


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


def is_identical(directory: Path, tensors: Mapping[str, Tensor]) -> bool:
    """Return whether a version's whole files hold exactly these tensors."""
    found: dict[str, Tensor] = {}
    for file in sorted(directory.glob("*.safetensors")):
        found |= load_file(file)
    return found.keys() == tensors.keys() and all(
        torch.equal(_bits(found[name]), _bits(tensor)) for name, tensor in tensors.items()
    )


def _bits(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8) if tensor.dim() else tensor


class Served:
    """An embedded engine and the proxy's check of a version, in front of it."""

    def __init__(self, model: Path, root: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self._plan = embedded_plan(model=str(model), port=port)
        self._model, self._root, self._labels, self._before = str(model), root, 0, ""
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

    def serve(self, weights: WeightsReference) -> Path:
        """Check a version as the proxy does and load it. Return the directory that the engine has read."""
        return asyncio.run(self._serve(weights))

    async def _serve(self, weights: WeightsReference) -> Path:
        self._labels += 1
        label = f"version-{self._labels}"
        inspector = WeightsInspector(self._root, self._root / "cache", 10**12)
        engine = SglangEngine(self._plan.url, EngineSettings(url=self._plan.url))
        try:
            await inspector.check(weights, self._model)
            await engine.load_weights(inspector.path_of(weights), label)
            if (await engine.info()).weight_label != label:
                raise RuntimeError("the engine does not serve the version that it loaded")
        finally:
            await engine.aclose()
            await inspector.aclose()
        for made in (self._root / "cache").glob("*"):
            if made.name not in (weights.sha256, self._before):
                shutil.rmtree(made)
        self._before = weights.sha256
        return Path(inspector.path_of(weights))


class Measured:
    """Versions that follow each other, each published, served, and copied."""

    def __init__(self, publisher: WeightPublisher, model: Path, directory: Path, served: Served) -> None:
        self._publisher = publisher
        self._directory = directory
        self._served = served
        self._timed = Timed()
        self._identical = True
        self._bytes: list[int] = []
        self._whole = 0
        self._head = Head(run_id=RunId("run_bench"), run_name="bench", version=0, base_model=str(model), weights=None)

    def publish(self, weights: Mapping[str, Tensor], *, counts: bool = True) -> float:
        """Publish the next version, and remove the one before. Return its stored bytes by those of whole files."""
        timed, publisher, head = self._timed if counts else Timed(), self._publisher, self._head
        tensors = timed.run("snapshot", lambda: snapshot(weights, publisher.dtype or torch.float32))
        staged = timed.run("stage", lambda: publisher.stage(head, tensors, None))
        publisher.settle(staged)
        whole = timed.run("served", lambda: self._served.serve(staged.weights))
        copied = self._directory / "copy"
        timed.run("copy", lambda: copy_durably(whole, copied))
        shutil.rmtree(copied)
        self._identical = self._identical and is_identical(whole, tensors)
        stored = sum(
            path.stat().st_size
            for path in Path(staged.weights.uri).iterdir()
            if path.suffix in (".safetensors", ".delta") or path.name == DELTA_INDEX
        )
        if counts:
            self._bytes.append(stored)
            self._whole = staged.weights.bytes
        if head.weights is not None and not is_delta(staged.weights):
            shutil.rmtree(head.weights.uri)
        self._head = msgspec.structs.replace(head, version=head.version + 1, weights=staged.weights)
        return float(stored / staged.weights.bytes)

    def figures(self, synchronous: float | None = None) -> dict[str, Any]:
        """Return the figures. `synchronous` are the seconds of a full write; None: those of these versions."""
        timed = self._timed
        at_once = synchronous or self.seconds()
        return {
            "bytes": int(statistics.median(self._bytes)),
            "seconds_to_served": round(timed.median("stage") + timed.median("served"), 3),
            "stall_vs_synchronous": round(timed.median("snapshot") / at_once, 3),
            "speed_vs_copy": round(timed.median("copy") / timed.median("stage"), 2),
            "bytes_vs_full": round(statistics.median(self._bytes) / self._whole, 4),
            "bit_identical": self._identical,
            "seconds": {name: round(timed.median(name), 4) for name in timed.seconds},
        }

    def seconds(self) -> float:
        """Return the seconds for which a step would wait if it published at once."""
        return self._timed.median("snapshot") + self._timed.median("stage")


def measure_size(size: str, rounds: int) -> dict[str, dict[str, Any]]:
    """Return the figures of each transport for a model of this size."""
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="base-rl-publish-") as made:
        directory = Path(made)
        model = model_of(size, directory / "model")
        with Served(directory / "model", directory) as served:
            at_once = None
            for transport, chosen in (
                ("disk float32", DiskWeights.model_validate({"dtype": "float32"})),
                ("disk bfloat16", DiskWeights.model_validate({"dtype": "bfloat16"})),
                ("delta bfloat16", DeltaWeights.model_validate({"dtype": "bfloat16", "full_every": 1000})),
            ):
                settings = chosen.model_copy(update={"directory": directory / "weights"})
                measured = Measured(
                    publisher_of(settings, directory / "model"), directory / "model", directory, served
                )
                model.at(LEARNING_RATES[0])
                measured.publish(model.weights(), counts=False)
                for _ in range(rounds):
                    model.step()
                    measured.publish(model.weights())
                found[transport] = measured.figures(at_once if isinstance(settings, DeltaWeights) else None)
                at_once = measured.seconds()
                if isinstance(settings, DeltaWeights):
                    found[transport]["bytes_vs_full_by_learning_rate"] = by_learning_rate(model, measured)
                print(size, transport, json.dumps(found[transport]), flush=True)
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=tuple(SHAPES), default=list(SHAPES))
    parser.add_argument("--short", action="store_true", help="1M parameters alone, and no result file")
    options = parser.parse_args()
    sizes = SHORT_SIZES if options.short else options.sizes
    result: dict[str, Any] = {}
    for size in sizes:
        for transport, figures in measure_size(size, 1 if options.short else 5).items():
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
