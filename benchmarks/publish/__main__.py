"""Bytes, seconds and the trainer's stall of a version: `python -m benchmarks.publish [--sizes 1M 100M 500M]`.

Each version is published by the trainer's publisher, checked by the proxy's inspector, and loaded by an embedded
engine. Beside each, its whole files are copied within the same file system and flushed: the disk, or shared memory
for `tensors`. Ratios are of medians in one run: the trainer's stall to the time that publishing the whole version at
once to the disk takes, and the speed of writing until engines can read to that of copying. `s3` writes to a server on
this machine, and an inspector that sees nothing of the trainer's disk fetches from there. With `collective` the
engine receives the weights, and its speed is that from the offer to the engine's serving. Versions follow each other
by steps of GRPO at a learning rate of 1e-6, for 500M parameters by random moves.
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
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.machine import describe
from benchmarks.publish.models import SHAPES, Moved, Trained, model_of
from proxy.contract.delta import DELTA_INDEX, is_delta
from proxy.contract.exchange import Offer
from proxy.contract.identifiers import RunId
from proxy.contract.memory import default_memory_directory, place_in_memory
from proxy.contract.policy import Head, WeightsReference
from proxy.engines.launch import embedded_plan, wait_until_ready
from proxy.engines.sglang import SglangEngine
from proxy.serving.offers import join
from proxy.settings import EngineSettings
from proxy.versions.inspector import WeightsInspector
from trainer.config import CollectiveWeights, DeltaWeights, DiskWeights, SharedDirectory, TensorsWeights
from trainer.models.state_dict import gather_weights
from trainer.publish.publisher import Staged, WeightPublisher
from trainer.publish.shards import content_of
from trainer.publish.transports import publisher_of

RESULT = Path(__file__).parents[1] / "results" / "publish.json"
SHORT_SIZES = ("1M",)
BUCKET = "weights"
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
        self._plan = embedded_plan(model=str(model), port=free_port())
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

    def serve(self, staged: Staged, settings: SharedDirectory) -> Path:
        """Check a version as the proxy does and load it. Return the directory that the engine has read, or would."""
        if staged.offer is not None:
            asyncio.run(self._receive(staged.weights, staged.offer))
            return Path(staged.weights.uri)
        return asyncio.run(self._serve(staged.weights, settings))

    def holds(self, tensors: Mapping[str, Tensor]) -> bool:
        """Return whether the engine computes with exactly these tensors, in its own precision of float32."""

        async def ask() -> Mapping[str, str]:
            engine = self._client()
            try:
                return await engine.checksums()
            finally:
                await engine.aclose()

        sums = asyncio.run(ask())
        wanted = {name: sha256(content_of(tensor.float())).hexdigest()[:16] for name, tensor in tensors.items()}
        return wanted.items() <= sums.items()

    def _client(self) -> SglangEngine:
        return SglangEngine(self._plan.url, EngineSettings(url=self._plan.url))

    async def _receive(self, weights: WeightsReference, offer: Offer) -> None:
        self._labels += 1
        inspector = WeightsInspector(self._root, senders=("127.0.0.1",))
        engine = self._client()
        try:
            await inspector.check_offer(weights, offer, self._model)
            await engine.receive_weights(await join(offer, 1), offer, f"version-{self._labels}")
        finally:
            await engine.aclose()
            await inspector.aclose()

    async def _serve(self, weights: WeightsReference, settings: SharedDirectory) -> Path:
        self._labels += 1
        label = f"version-{self._labels}"
        memory = settings.memory if isinstance(settings, TensorsWeights) else None
        # Without the trainer's disk, so that versions are fetched.
        root = self._root if settings.url is None else self._root / "elsewhere"
        inspector = WeightsInspector(root, self._root / "cache", 10**12, url=settings.url, memory=memory)
        engine = self._client()
        try:
            if memory is None:
                await inspector.check(weights, self._model)
                path = inspector.path_of(weights)
            else:
                await inspector.check_in_memory(weights, self._model)
                path = str(place_in_memory(weights, memory))
            await engine.load_weights(path, label)
            if (await engine.info()).weight_label != label:
                raise RuntimeError("the engine does not serve the version that it loaded")
        finally:
            await engine.aclose()
            await inspector.aclose()
        for made in (self._root / "cache").glob("*"):
            if made.name not in (Path(path).name, self._before):
                shutil.rmtree(made)
        self._before = Path(path).name
        return Path(path)


class Measured:
    """Versions that follow each other, each published, served, and copied."""

    def __init__(
        self, settings: SharedDirectory, model: Path, directory: Path, served: Served, synchronous: float | None
    ) -> None:
        """`synchronous` are the seconds of a full write to the disk; None: those of these versions."""
        self._settings = settings
        self._publisher: WeightPublisher = publisher_of(settings, model)
        self._copied = (settings.memory if isinstance(settings, TensorsWeights) else directory) / "copy"
        self._synchronous = synchronous
        self._served = served
        self._timed = Timed()
        self._copies: Mapping[str, Tensor] = {}
        self._identical = True
        self._bytes: list[int] = []
        self._whole = 0
        self._head = Head(run_id=RunId("run_bench"), run_name="bench", version=0, base_model=str(model), weights=None)

    def publish(self, weights: Mapping[str, Tensor], *, counts: bool = True) -> float:
        """Publish the next version, and remove the one before. Return its stored bytes by those of whole files."""
        timed, publisher, head = self._timed if counts else Timed(), self._publisher, self._head
        # As the loop copies the weights before the next step changes them.
        named: Any = weights.items()
        tensors = timed.run(
            "snapshot", lambda: gather_weights(named, keep=True, dtype=publisher.dtype, into=self._copies)
        )
        self._copies = {} if publisher.keeps_weights else tensors
        staged = timed.run("stage", lambda: publisher.stage(head, tensors, None))
        whole = timed.run("served", lambda: self._served.serve(staged, self._settings))
        if staged.offer is not None:
            self._identical = self._identical and self._served.holds(tensors)
        if staged.save is not None:
            staged = timed.run("saved", partial(staged.save, 1))
            self._identical = self._identical and is_identical(Path(staged.weights.uri), tensors)
        publisher.settle(staged)
        timed.run("copy", lambda: copy_durably(whole, self._copied))
        shutil.rmtree(self._copied)
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
            publisher.remove([head.weights.uri])
        self._head = msgspec.structs.replace(head, version=head.version + 1, weights=staged.weights)
        return float(stored / staged.weights.bytes)

    def figures(self) -> dict[str, Any]:
        timed = self._timed
        at_once = self._synchronous or self.seconds()
        return {
            "bytes": int(statistics.median(self._bytes)),
            "seconds_to_served": round(timed.median("stage") + timed.median("served"), 3),
            "stall_vs_synchronous": round(timed.median("snapshot") / at_once, 3),
            "speed_vs_copy": round(timed.median("copy") / self._seconds_to_readable(), 2),
            "bytes_vs_full": round(statistics.median(self._bytes) / self._whole, 4),
            "bit_identical": self._identical,
            "seconds": {name: round(timed.median(name), 4) for name in timed.seconds},
        }

    def _seconds_to_readable(self) -> float:
        """Return the seconds until engines can read a version; of one that is sent to them, until they have it."""
        sent = isinstance(self._settings, CollectiveWeights)
        return self._timed.median("stage") + (self._timed.median("served") if sent else 0.0)

    def seconds(self) -> float:
        """Return the seconds for which a step would wait if it published at once."""
        return self._timed.median("snapshot") + self._timed.median("stage")

    def close(self) -> None:
        self._publisher.close()


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
            at_once: float | None = None
            for transport, settings in transports(directory / "weights", Path(memory)):
                is_disk = transport.startswith("disk")
                measured = Measured(settings, directory / "model", directory, served, None if is_disk else at_once)
                model.at(LEARNING_RATES[0])
                measured.publish(model.weights(), counts=False)
                for _ in range(rounds):
                    model.step()
                    measured.publish(model.weights())
                found[transport] = measured.figures()
                if is_disk:
                    at_once = measured.seconds()
                if isinstance(settings, DeltaWeights):
                    found[transport]["bytes_vs_full_by_learning_rate"] = by_learning_rate(model, measured)
                print(size, transport, json.dumps(found[transport]), flush=True)
                measured.close()
                shutil.rmtree(directory / "weights")
    return found


@contextmanager
def object_store() -> Iterator[None]:
    """Run an S3 server (moto's) in a process of its own, which the AWS environment names."""
    import boto3  # type: ignore[import-untyped]

    port = free_port()
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-p", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    os.environ |= {
        "AWS_ENDPOINT_URL_S3": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "NO_PROXY": "127.0.0.1",
    }
    try:
        wait_for_port(port, server)
        boto3.session.Session().client("s3").create_bucket(Bucket=BUCKET)
        yield
    finally:
        server.terminate()
        server.wait(30)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def wait_for_port(port: int, server: subprocess.Popen[bytes]) -> None:
    """Wait until the server accepts connections, for a minute at most."""
    deadline = time.monotonic() + 60
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            if server.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("the object store did not start") from None
            time.sleep(0.1)


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
