"""Safetensors files of whole weights, hashed while they are written, in one pass and without a copy in memory."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainer.models.divided import DividedWeights
from trainer.parallel.mesh import Ranks

SINGLE = "model.safetensors"
INDEX = f"{SINGLE}.index.json"
MEGABYTE = 1_000_000
"""Bytes in a megabyte of `shard_megabytes`."""
# Large enough that the cost of a call is nothing, and a multiple of a page.
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
    _write_index(shards, tensors, directory)
    return sums


def write_divided(weights: DividedWeights, directory: Path, most_bytes: int, ranks: Ranks) -> dict[str, str]:
    """Write the weights of a divided model as `write_shards` would, each while it is gathered. A collective; ranks
    other than the first return {}.

    The first rank raises OSError if it cannot write, after it has taken part in all gathering: the other ranks wait
    for it there.
    """
    shards = shards_of(weights.described, most_bytes)
    sums: dict[str, str] = {}
    failure: OSError | None = None
    for shard in shards:
        ordered, header = header_of(weights.described, shard.tensors)
        gathered = weights.stream(ordered)
        if ranks.is_first and failure is None:
            try:
                sums[shard.file] = _write_stream(_parts(header, gathered), directory / shard.file)
            except OSError as error:
                failure = error
        for _ in gathered:
            pass
    if failure is not None:
        raise failure
    if ranks.is_first:
        _write_index(shards, weights.described, directory)
    return sums


def _write_index(shards: Sequence[Shard], tensors: Mapping[str, Tensor], directory: Path) -> None:
    if len(shards) == 1:
        return
    places = {name: shard.file for shard in shards for name in shard.tensors}
    index = {
        "metadata": {"total_size": sum(tensor.nbytes for tensor in tensors.values())},
        "weight_map": dict(sorted(places.items())),
    }
    (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n")


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
    ordered, header = header_of(tensors, names)
    blocks = list(_parts(header, (tensors[name] for name in ordered)))
    # Hashing releases the interpreter's lock, so it runs beside the writes and the flush. In one piece: with a
    # hand-over for each block, the two threads waited for each other and writing took twice to three times as long.
    with ThreadPoolExecutor(1, "sha256") as pool:
        digest = pool.submit(_sha256, blocks)
        with path.open("wb", buffering=0) as stream:
            for block in blocks:
                _write_all(stream.fileno(), block)
            os.fsync(stream.fileno())
        return digest.result()


def _sha256(blocks: Iterable[memoryview]) -> str:
    sha256 = hashlib.sha256()
    for block in blocks:
        sha256.update(block)
    return sha256.hexdigest()


def _write_stream(blocks: Iterable[memoryview], path: Path) -> str:
    """Write blocks that are in memory one at a time, flushed to the disk, and return their SHA-256."""
    sha256 = hashlib.sha256()
    with path.open("wb", buffering=0) as stream:
        for block in blocks:
            sha256.update(block)
            _write_all(stream.fileno(), block)
        os.fsync(stream.fileno())
    return sha256.hexdigest()


def _parts(header: bytes, tensors: Iterable[Tensor | None]) -> Iterator[memoryview]:
    """Yield the bytes of a file in blocks."""
    yield memoryview(header)
    for tensor in tensors:
        if tensor is None:
            raise ValueError("only the first rank, which has the tensors, writes")
        content = content_of(tensor)
        for begin in range(0, len(content), _BLOCK):
            yield content[begin : begin + _BLOCK]


def _write_all(descriptor: int, block: memoryview) -> None:
    while block:
        block = block[os.write(descriptor, block) :]
