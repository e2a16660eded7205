"""The files of a trainer state: tensors in safetensors, their index in JSON. Reading them never runs code.

`torch.distributed.checkpoint` plans which rank writes and reads which part. Only its storage is replaced here,
because torch's own index is a pickle, which can run any code that its author put into it.

```
rank-00000.safetensors   one per rank: the parts of tensors that this rank writes, named PATH@OFFSET_OFFSET…
state.json               StateIndex; written last
```
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from trainer.errors import WeightsUnusable

INDEX = "state.json"
"""The file that is written last: without it a directory holds no state."""

_RANK_FILE = re.compile(r"rank-\d{5,}\.safetensors")
_BLOCK = 1 << 20
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""The dtypes of a state's tensors by their safetensors names."""
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class StoredPart(msgspec.Struct, frozen=True):
    """One box of a tensor: its file, and its begin and length in each dimension."""

    file: str
    offsets: tuple[int, ...]
    shape: tuple[int, ...]


class StoredTensor(msgspec.Struct, frozen=True):
    dtype: str
    shape: tuple[int, ...]
    parts: tuple[StoredPart, ...]


class StoredFile(msgspec.Struct, frozen=True):
    sha256: str
    bytes: int


class StateIndex(msgspec.Struct, frozen=True, kw_only=True):
    """`state.json`: the plain values of the state, and where its tensors are. `files` has a checksum for every other
    file of the directory, so a checksum of this file covers the whole state."""

    plain: dict[str, Any]
    tensors: dict[str, StoredTensor]
    files: dict[str, StoredFile]


def read_index(directory: Path) -> StateIndex:
    """Read and check the index of a state's directory. Raises WeightsUnusable."""
    path = directory / INDEX
    try:
        content = path.read_bytes()
        fields = json.loads(content)
        if not isinstance(fields, dict) or "tensors" not in fields:
            raise WeightsUnusable(_old_format(directory))
        index = msgspec.json.decode(content, type=StateIndex)
    except (OSError, ValueError, RecursionError) as error:
        raise WeightsUnusable(f"{path} cannot be read: {error}") from error
    problem = next(_problems(index), None)
    if problem is not None:
        raise WeightsUnusable(f"{path} is damaged: {problem}")
    return index


def refuse_pickles(directory: Path) -> None:
    """Raise WeightsUnusable for a state that an earlier trainer wrote: its index or all of it is a pickle."""
    if holds_pickles(directory):
        raise WeightsUnusable(_old_format(directory))


def holds_pickles(directory: Path) -> bool:
    """Whether an earlier trainer wrote this state."""
    return (directory / ".metadata").exists() or (directory / "state.pt").exists()


def _old_format(directory: Path) -> str:
    return (
        f"{directory} was written by an earlier version of base-rl in a format that can run code when it is read"
        " (a pickle), so it is not read any more. To go on from this version's weights with a fresh optimiser, remove"
        " that directory and start the trainer again"
    )


def _problems(index: StateIndex) -> Iterator[str]:
    """Reasons why an index cannot describe its files. Each part is checked against its tensor, and all parts against
    the size of their file, before memory is reserved for any tensor."""
    sizes = dict.fromkeys(index.files, 0)
    for name in index.files:
        if not _RANK_FILE.fullmatch(name):
            yield f"{name!r} is no file of a trainer state"
    for path, tensor in index.tensors.items():
        if tensor.dtype not in DTYPES:
            yield f"{path} has the unknown dtype {tensor.dtype!r}"
            return
        for part in tensor.parts:
            if part.file not in sizes:
                yield f"{path} is in {part.file!r}, which is not listed"
                return
            if not _is_inside(part, tensor.shape):
                yield f"a part of {path} lies outside of it"
            sizes[part.file] += math.prod(part.shape) * DTYPES[tensor.dtype].itemsize
        if sum(math.prod(part.shape) for part in tensor.parts) != math.prod(tensor.shape):
            yield f"the parts of {path} are not the whole tensor"
    for name, size in sizes.items():
        if size > index.files[name].bytes:
            yield f"{name} is too small for what it should hold"


def _is_inside(part: StoredPart, shape: Sequence[int]) -> bool:
    if not len(part.offsets) == len(part.shape) == len(shape):
        return False
    return all(
        min(offset, length) >= 0 and offset + length <= size
        for offset, length, size in zip(part.offsets, part.shape, shape, strict=True)
    )


class StateWriter(StorageWriter):
    """Write the parts that the plan gives to this rank; the coordinating rank adds the index with `plain`."""

    def __init__(self, directory: Path, rank: int, plain: dict[str, Any]) -> None:
        self._directory = directory
        self._file = f"rank-{rank:05d}.safetensors"
        self._plain = plain

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *_: Any, **__: Any) -> None:
        self._directory.mkdir(exist_ok=True)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results: list[WriteResult] = []
        if plan.items:
            stored = _write_tensors(self._directory / self._file, plan.items, planner)
            results = [
                WriteResult(index=item.index, size_in_bytes=_size(item), storage_data=(self._file, stored))
                for item in plan.items
            ]
        return _done(results)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        files: dict[str, StoredFile] = {}
        places: dict[MetadataIndex, str] = {}
        for result in (each for of_rank in results for each in of_rank):
            places[result.index], files[result.storage_data[0]] = result.storage_data[0], result.storage_data[1]
        tensors = {path: _stored(path, entry, places) for path, entry in metadata.state_dict_metadata.items()}
        index = StateIndex(plain=self._plain, tensors=tensors, files=files)
        with (self._directory / INDEX).open("wb") as stream:
            stream.write(msgspec.json.encode(index))
            _flush(stream)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


class StateReader(StorageReader):
    """Read this rank's part of the plan, after the checksums of all files have been verified.

    The `size` ranks divide the files among them, so that each file is read only once for its checksum.
    """

    def __init__(self, directory: Path, index: StateIndex, rank: int, size: int) -> None:
        self._directory = directory
        self._index = index
        self._to_check = sorted(index.files)[rank::size]

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        pass

    def read_metadata(self, *_: Any) -> Metadata:
        tensors: dict[str, Any] = {path: described(tensor) for path, tensor in self._index.tensors.items()}
        return Metadata(state_dict_metadata=tensors)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *_: Any) -> None:
        self._files = {
            (path, part.offsets): part.file for path, tensor in self._index.tensors.items() for part in tensor.parts
        }

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        # Ranks exchange failures while they plan, before any of them reads: raising here ends the load on all ranks.
        for name in self._to_check:
            if _checksum(self._directory / name) != self._index.files[name]:
                raise WeightsUnusable(f"{name} is not the file that was written (SHA-256 or size differs)")
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        wanted: dict[str, list[Any]] = {}
        for item in plan.items:
            wanted.setdefault(self._file_of(item.storage_index), []).append(item)
        for name, items in wanted.items():
            try:
                self._read(self._directory / name, items, planner)
            except SafetensorError as error:
                raise WeightsUnusable(f"{name}: {error}") from error
        return _done(None)

    def _file_of(self, index: MetadataIndex) -> str:
        return self._files[index.fqn, tuple(index.offset or ())]

    def _read(self, path: Path, items: Sequence[Any], planner: LoadPlanner) -> None:
        with safe_open(path, framework="pt", device="cpu") as stream:
            for item in items:
                name = _key(item.storage_index)
                box = tuple(
                    slice(offset, offset + length)
                    for offset, length in zip(item.storage_offsets, item.lengths, strict=True)
                )
                found = stream.get_slice(name)[box] if box else stream.get_tensor(name)
                target = planner.resolve_tensor(item).detach()
                if found.shape != target.shape or found.dtype != target.dtype:
                    raise WeightsUnusable(f"{path.name}: {name} has another shape or dtype than the index says")
                target.copy_(found)
                planner.commit_tensor(item, target)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


def described(tensor: StoredTensor) -> TensorStorageMetadata:
    """Return a stored tensor's description in torch's types."""
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=DTYPES[tensor.dtype]),
        size=torch.Size(tensor.shape),
        chunks=[
            ChunkStorageMetadata(offsets=torch.Size(part.offsets), sizes=torch.Size(part.shape))
            for part in tensor.parts
        ],
    )


def _stored(path: str, entry: Any, places: dict[MetadataIndex, str]) -> StoredTensor:
    parts = [
        StoredPart(places[MetadataIndex(path, chunk.offsets)], tuple(chunk.offsets), tuple(chunk.sizes))
        for chunk in entry.chunks
    ]
    return StoredTensor(_NAMES[entry.properties.dtype], tuple(entry.size), tuple(parts))


def _key(index: MetadataIndex) -> str:
    """Return the name of a part within its file: ranks may have several parts of one tensor."""
    return f"{index.fqn}@{'_'.join(map(str, index.offset or ()))}"


def _described(item: WriteItem) -> tuple[torch.dtype, torch.Size]:
    if item.tensor_data is None:
        raise WeightsUnusable(f"{item.index.fqn} is not a tensor")
    return item.tensor_data.properties.dtype, item.tensor_data.chunk.sizes


def _size(item: WriteItem) -> int:
    dtype, shape = _described(item)
    return math.prod(shape) * dtype.itemsize


def _write_tensors(path: Path, items: Sequence[WriteItem], planner: SavePlanner) -> StoredFile:
    """Write a safetensors file tensor by tensor, flush it to the disk and return its checksum.

    `safetensors.torch.save_file` would hold a second copy of everything in memory, and the file would have to be read
    again for its checksum.
    """
    ordered = sorted(items, key=lambda item: (-_described(item)[0].itemsize, _key(item.index)))
    header: dict[str, Any] = {}
    end = 0
    for item in ordered:
        begin, end = end, end + _size(item)
        dtype, shape = _described(item)
        header[_key(item.index)] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)  # the format wants its data aligned
    sha256 = hashlib.sha256()
    with path.open("wb") as stream:
        for part in (len(head).to_bytes(8, "little"), head):
            sha256.update(part)
            stream.write(part)
        for item in ordered:
            block = _content(planner.resolve_data(item), item)
            sha256.update(block)
            stream.write(block)
        _flush(stream)
    return StoredFile(sha256.hexdigest(), 8 + len(head) + end)


def _content(tensor: Any, item: WriteItem) -> memoryview:
    dtype, shape = _described(item)
    if not isinstance(tensor, Tensor) or tensor.dtype != dtype or tensor.shape != shape:
        raise WeightsUnusable(f"{item.index.fqn} changed while it was written")
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    content: Any = flat.view(torch.uint8).numpy()
    return memoryview(content)


def _checksum(path: Path) -> StoredFile:
    sha256, size = hashlib.sha256(), 0
    with path.open("rb") as stream:
        while block := stream.read(_BLOCK):
            sha256.update(block)
            size += len(block)
    return StoredFile(sha256.hexdigest(), size)


def _flush(stream: Any) -> None:
    stream.flush()
    os.fsync(stream.fileno())


def _done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future
