"""Versions as differences to the version before, which are whole again every few versions and after each start."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
from torch import Tensor

from proxy.contract.delta import BLOCK, DELTA_INDEX, DeltaBlock, DeltaFile, DeltaIndex, encode_block, is_delta
from proxy.contract.policy import Head, WeightsFormat, WeightsReference
from trainer.config import DeltaWeights
from trainer.models.policy import Policy
from trainer.models.state_dict import joint_digest
from trainer.parallel.mesh import Ranks
from trainer.publish.disk import DiskPublisher, Saved
from trainer.publish.publisher import Staged, TrainerState
from trainer.publish.shards import content_of, header_of, shards_of


class _Before(NamedTuple):
    """The weights of the version that the next difference is made from, and how many differences lead to it."""

    weights: WeightsReference
    tensors: Mapping[str, Tensor]
    differences: int


class DeltaPublisher(DiskPublisher):
    """A publisher over shared storage that writes whole weights rarely. Adapters are always written whole.

    It keeps the published weights in memory until the next version. A version whose base it does not have in memory,
    as after a start or a rollback, is written whole.
    """

    def __init__(
        self, settings: DeltaWeights, base: Path, policy: Policy | None = None, ranks: Ranks | None = None
    ) -> None:
        super().__init__(settings, base, policy, ranks)
        self._full_every = settings.full_every
        self._before: _Before | None = None
        self._staged: Mapping[str, Tensor] = {}

    @property
    def keeps_weights(self) -> bool:
        return True

    @property
    def _streams(self) -> bool:
        """No: the next difference needs the weights whole in memory."""
        return False

    def settle(self, staged: Staged) -> None:
        super().settle(staged)
        differences = 0
        if is_delta(staged.weights) and self._before is not None:
            differences = self._before.differences + 1
        self._before = _Before(staged.weights, self._staged, differences)
        self._staged = {}

    def restore(
        self, head: Head, policy: Policy, divided: Mapping[str, Tensor | None] | None = None
    ) -> TrainerState | None:
        self._before = None
        return super().restore(head, policy, divided)

    def _save(self, head: Head, tensors: Mapping[str, Tensor], directory: Path) -> Saved:
        self._staged = tensors if self.dtype is not None else {}
        before = self._before
        if self.dtype is None or before is None or head.weights != before.weights:
            return super()._save(head, tensors, directory)
        if before.differences + 1 >= self._full_every or not _is_alike(tensors, before.tensors):
            return super()._save(head, tensors, directory)
        files: dict[str, DeltaFile] = {}
        sums: dict[str, str] = {}
        for shard in shards_of(tensors, self.shard_bytes):
            name = f"{shard.file}.delta"
            files[shard.file], sums[name] = _write(tensors, before.tensors, shard.tensors, directory / name)
        index = msgspec.json.encode(DeltaIndex(before.weights, files))
        (directory / DELTA_INDEX).write_bytes(index)
        return Saved(
            WeightsFormat.HUGGINGFACE,
            sums,
            joint_digest({name: file.sha256 for name, file in files.items()}),
            sum(file.bytes for file in files.values()),
        )


def _is_alike(tensors: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> bool:
    return tensors.keys() == others.keys() and all(
        (tensor.shape, tensor.dtype) == (others[name].shape, others[name].dtype) for name, tensor in tensors.items()
    )


def _write(
    tensors: Mapping[str, Tensor], before: Mapping[str, Tensor], names: Sequence[str], path: Path
) -> tuple[DeltaFile, str]:
    """Write the difference of one file. Return its description, and the SHA-256 of what was written."""
    result, written = hashlib.sha256(), hashlib.sha256()
    blocks: list[DeltaBlock] = []
    size = 0
    with path.open("wb", buffering=0) as stream:
        for new, old, width in _pairs(tensors, before, names):
            result.update(new)
            stored = encode_block(new, old, width)
            written.update(stored)
            stream.write(stored)
            blocks.append(DeltaBlock(len(new), len(stored), width))
            size += len(new)
        os.fsync(stream.fileno())
    return DeltaFile(result.hexdigest(), size, tuple(blocks)), written.hexdigest()


def _pairs(
    tensors: Mapping[str, Tensor], before: Mapping[str, Tensor], names: Sequence[str]
) -> Iterator[tuple[memoryview, memoryview, int]]:
    """Yield the blocks of a file, those of the file before, and the bytes of each number."""
    ordered, header = header_of(tensors, names)
    for begin in range(0, len(header), BLOCK):
        block = memoryview(header)[begin : begin + BLOCK]
        yield block, block, 1
    for name in ordered:
        new, old, width = content_of(tensors[name]), content_of(before[name]), tensors[name].dtype.itemsize
        for begin in range(0, len(new), BLOCK):
            yield new[begin : begin + BLOCK], old[begin : begin + BLOCK], width
