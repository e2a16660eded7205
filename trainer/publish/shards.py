"""Safetensors files of whole weights, hashed while they are written, in one pass and without a copy in memory."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

SINGLE = "model.safetensors"
INDEX = f"{SINGLE}.index.json"
MEGABYTE = 1_000_000
"""Bytes in a megabyte of `shard_megabytes`."""
# Large enough that the cost of a call is nothing, small enough that hashing and writing overlap.
_BLOCK = 8 << 20
_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64"}


class Shard(NamedTuple):
    """One file, and the names of its tensors."""

    file: str
    tensors: tuple[str, ...]


def shards_of(tensors: Mapping[str, Tensor], most_bytes: int) -> list[Shard]:
    """Divide tensors over files of at most `most_bytes`; a larger tensor has a file of its own.

    A single file is `model.safetensors`, several have Hugging Face's numbered names.
    """
    groups: list[list[str]] = [[]]
    size = 0
    for name in sorted(tensors):
        if groups[-1] and size + tensors[name].nbytes > most_bytes:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += tensors[name].nbytes
    if len(groups) == 1:
        return [Shard(SINGLE, tuple(groups[0]))]
    return [
        Shard(f"model-{number:05d}-of-{len(groups):05d}.safetensors", tuple(group))
        for number, group in enumerate(groups, start=1)
    ]


def write_shards(tensors: Mapping[str, Tensor], directory: Path, most_bytes: int) -> dict[str, str]:
    """Write tensors, and the index that several files need. Return the SHA-256 of each safetensors file.

    Equal tensors give equal bytes, those of `safetensors.torch.save_file`. The files are flushed to the disk.
    """
    shards = shards_of(tensors, most_bytes)
    sums = {shard.file: write_file(tensors, shard.tensors, directory / shard.file) for shard in shards}
    if len(shards) > 1:
        places = {name: shard.file for shard in shards for name in shard.tensors}
        index = {
            "metadata": {"total_size": sum(tensor.nbytes for tensor in tensors.values())},
            "weight_map": dict(sorted(places.items())),
        }
        (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    return sums


def header_of(tensors: Mapping[str, Tensor], names: Sequence[str]) -> tuple[list[str], bytes]:
    """Return the names in the order of their bytes in a file, and the bytes before the first tensor."""
    ordered = sorted(names, key=lambda name: (-tensors[name].dtype.itemsize, name))
    fields: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in ordered:
        begin, end = end, end + tensors[name].nbytes
        dtype, shape = _NAMES[tensors[name].dtype], list(tensors[name].shape)
        fields[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # the format aligns the data to 8 bytes
    return ordered, len(text).to_bytes(8, "little") + text


def content_of(tensor: Tensor) -> memoryview:
    """Return a tensor's bytes without a copy. It must be contiguous and on the CPU."""
    flat: Any = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return memoryview(flat)


def write_file(tensors: Mapping[str, Tensor], names: Sequence[str], path: Path) -> str:
    """Write the named tensors to one file, flushed to the disk, and return its SHA-256."""
    sha256 = hashlib.sha256()
    hashed: Future[None] | None = None
    # Hashing releases the interpreter's lock, so it runs beside the writes and costs no time of its own on two cores.
    with path.open("wb", buffering=0) as stream, ThreadPoolExecutor(1, "sha256") as pool:
        for block in _blocks(tensors, names):
            before, hashed = hashed, pool.submit(sha256.update, block)
            _write_all(stream.fileno(), block)
            if before is not None:
                before.result()
        if hashed is not None:
            hashed.result()
        os.fsync(stream.fileno())
    return sha256.hexdigest()


def _blocks(tensors: Mapping[str, Tensor], names: Sequence[str]) -> Iterator[memoryview]:
    ordered, header = header_of(tensors, names)
    yield memoryview(header)
    for name in ordered:
        content = content_of(tensors[name])
        for begin in range(0, len(content), _BLOCK):
            yield content[begin : begin + _BLOCK]


def _write_all(descriptor: int, block: memoryview) -> None:
    while block:
        block = block[os.write(descriptor, block) :]
