"""Versions that follow each other, each published, served, and copied."""

from __future__ import annotations

import os
import shutil
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.publish.serving import Served
from proxy.contract.delta import DELTA_INDEX, is_delta
from proxy.contract.identifiers import RunId
from proxy.contract.policy import Head
from trainer.config import CollectiveWeights, DiskWeights, SharedDirectory, TensorsWeights
from trainer.models.state_dict import gather_weights
from trainer.parallel.checkpoint import copied
from trainer.publish.publisher import WeightPublisher
from trainer.publish.transports import publisher_of

_SCRATCH_BLOCK = 8 << 20


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


class Measured:
    """Versions that follow each other, each published, served, and copied."""

    def __init__(
        self, settings: SharedDirectory, model: Path, directory: Path, served: Served, synchronous: Synchronous
    ) -> None:
        self._settings = settings
        self._publisher: WeightPublisher = publisher_of(settings, model)
        self._copied = (settings.memory if isinstance(settings, TensorsWeights) else directory) / "copy"
        self._scratch = self._copied.with_name("scratch")
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
        size = sum(tensor.nbytes for tensor in tensors.values())
        begin_even(self._scratch, size)
        staged = timed.run("stage", lambda: publisher.stage(head, tensors, None))
        whole = timed.run("served", lambda: self._served.serve(staged, self._settings))
        if staged.offer is not None:
            self._identical = self._identical and self._served.holds(tensors)
        if staged.save is not None:
            staged = timed.run("saved", partial(staged.save, 1))
            self._identical = self._identical and is_identical(Path(staged.weights.uri), tensors)
        publisher.settle(staged)
        begin_even(self._scratch, size)
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
        at_once, snapshot = self._synchronous.seconds, timed.median("snapshot")
        return {
            "bytes": int(statistics.median(self._bytes)),
            "seconds_to_served": round(timed.median("stage") + timed.median("served"), 3),
            "stall_vs_synchronous": round(snapshot / at_once, 3),
            "stall_with_state_vs_synchronous": round((snapshot + self._synchronous.state_copied) / at_once, 3),
            "speed_vs_copy": round(timed.median("copy") / self._seconds_to_readable(), 2),
            "bytes_vs_full": round(statistics.median(self._bytes) / self._whole, 4),
            "bit_identical": self._identical,
            "seconds": {name: round(timed.median(name), 4) for name in timed.seconds},
        }

    def _seconds_to_readable(self) -> float:
        """Return the seconds until engines can read a version; of one that is sent to them, until they have it."""
        sent = isinstance(self._settings, CollectiveWeights)
        return self._timed.median("stage") + (self._timed.median("served") if sent else 0.0)

    def close(self) -> None:
        self._publisher.close()


class Synchronous(NamedTuple):
    """Seconds to write a version with its optimiser's state to the disk, all in float32, and to copy that state in
    memory."""

    seconds: float
    state_copied: float


def synchronous_write(weights: Mapping[str, Tensor], model: Path, directory: Path, rounds: int) -> Synchronous:
    """Measure for how long a step would wait if it published at once: 12 bytes for each parameter."""
    settings = DiskWeights.model_validate({"dtype": "float32", "directory": directory / "weights"})
    publisher, timed = publisher_of(settings, model), Timed()
    head = Head(run_id=RunId("run_at_once"), run_name="bench", version=0, base_model=str(model), weights=None)
    state = {
        "optimizer": {
            name: {moment: torch.rand_like(tensor, dtype=torch.float32) for moment in ("exp_avg", "exp_avg_sq")}
            for name, tensor in weights.items()
        }
    }
    size = 3 * sum(4 * tensor.numel() for tensor in weights.values())
    copies = copied(state)
    for _ in range(rounds):
        copies = timed.run("state", partial(copied, state, copies))
        named: Any = weights.items()
        tensors = gather_weights(named, keep=True, dtype=publisher.dtype)
        begin_even(directory / "scratch", size)
        staged = timed.run("at once", partial(publisher.stage, head, tensors, state))
        publisher.settle(staged)
        publisher.remove([staged.weights.uri])
    publisher.close()
    return Synchronous(timed.median("at once"), timed.median("state"))


def begin_even(scratch: Path, size: int) -> None:
    """Flush what was written or removed before, and write and remove a file of `size` bytes.

    A virtual machine may have given free memory back to its host, and whatever is written first waits for the host:
    here for up to six times as long as the same bytes take again.
    """
    os.sync()
    block = bytes(_SCRATCH_BLOCK)
    with scratch.open("wb", buffering=0) as stream:
        for _ in range(0, size, _SCRATCH_BLOCK):
            stream.write(block)
    scratch.unlink()


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
