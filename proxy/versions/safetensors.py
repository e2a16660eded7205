"""Read safetensors files without torch: the header, and one pass over the content for its checksum and its numbers.

A file consists of 8 bytes with the header's length (little endian), the header in JSON, and the tensors' bytes
without gaps.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from proxy.errors import WeightsRejected

# The format's own limit. A larger length is damage, and the proxy must not allocate that much memory for it.
_MAX_HEADER_BYTES = 100 << 20
# Bytes read at once: it bounds the memory of a check, and is a multiple of every dtype's size. Files are read and not
# mapped, because a mapped file that is truncated meanwhile would kill the proxy with SIGBUS.
_BLOCK = 4 << 20
_CONVERTED = 1 << 14

SIZES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "I16": 2,
    "U16": 2,
    "F16": 2,
    "BF16": 2,
    "I32": 4,
    "U32": 4,
    "F32": 4,
    "I64": 8,
    "U64": 8,
    "F64": 8,
}
FLOATS = frozenset({"F8_E4M3", "F8_E5M2", "F8_E8M0", "F16", "BF16", "F32", "F64"})

_WIDE_FLOATS = frozenset({"F16", "BF16", "F32", "F64"})

# Bits that are all set in NaN and in the infinities: the exponent, or a dtype's only pattern for NaN. numpy has no
# bfloat16 and no 8-bit floats, so the check compares bits.
_NOT_FINITE: dict[str, tuple[Any, int]] = {
    "F64": (np.dtype("<u8"), 0x7FF0000000000000),
    "F32": (np.dtype("<u4"), 0x7F800000),
    "F16": (np.dtype("<u2"), 0x7C00),
    "BF16": (np.dtype("<u2"), 0x7F80),
    "F8_E5M2": (np.dtype("u1"), 0x7C),
    "F8_E4M3": (np.dtype("u1"), 0x7F),
    "F8_E8M0": (np.dtype("u1"), 0xFF),
}


class TensorEntry(msgspec.Struct, frozen=True):
    """One tensor of a file; `begin` and `end` count bytes from the end of the header."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class Header(msgspec.Struct, frozen=True):
    """The tensors of a file by name, in the order of their bytes. The first one starts at byte `data_start`."""

    tensors: dict[str, TensorEntry]
    data_start: int


def read_header(path: Path) -> Header:
    """Read and check a file's header. Raises WeightsRejected for a damaged file, OSError."""
    size = path.stat().st_size
    with path.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
            raise WeightsRejected(f"{path.name} is truncated or is no safetensors file")
        content = stream.read(length)
    try:
        fields = json.loads(content)
        fields.pop("__metadata__", None)
        entries = {name: _entry(entry) for name, entry in fields.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise WeightsRejected(f"the header of {path.name} cannot be read") from error
    ordered = dict(sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)))
    _check_layout(path.name, ordered, size - 8 - length)
    return Header(ordered, 8 + length)


def scan(
    path: Path, header: Header, is_cancelled: Callable[[], bool], squares: dict[str, float] | None = None
) -> str:
    """Read a file once and return its SHA-256.

    `squares` gets the sum of squares of each tensor whose floats have 16 bits or more. Raises WeightsRejected for a
    number that is not finite, InterruptedError once `is_cancelled` returns True, OSError.
    """
    sha256 = hashlib.sha256()
    with path.open("rb") as stream:
        sha256.update(stream.read(header.data_start))
        for name, tensor in header.tensors.items():
            left = tensor.end - tensor.begin
            while left:
                if is_cancelled():
                    raise InterruptedError("the check was cancelled")
                block = stream.read(min(left, _BLOCK))
                if len(block) < min(left, _BLOCK):
                    raise WeightsRejected(f"{path.name} is truncated")
                sha256.update(block)
                if not _is_finite(block, tensor.dtype):
                    raise WeightsRejected(f"{name} in {path.name} has values that are not finite (NaN or infinity)")
                if squares is not None and tensor.dtype in _WIDE_FLOATS:
                    squares[name] = squares.get(name, 0.0) + _sum_of_squares(block, tensor.dtype)
                left -= len(block)
        if stream.read(1):
            raise WeightsRejected(f"{path.name} grew while it was checked")
    return sha256.hexdigest()


def _is_finite(block: bytes, dtype: str) -> bool:
    if dtype not in _NOT_FINITE:
        return True
    kind, bits = _NOT_FINITE[dtype]
    values = np.frombuffer(block, kind)
    return bool(np.bitwise_and(values, kind.type(bits)).max() != bits)


def _sum_of_squares(block: bytes, dtype: str) -> float:
    with np.errstate(over="ignore"):  # infinity is an answer: no sound tensor is that large
        if dtype in ("F32", "F64"):
            values = np.frombuffer(block, f"<f{SIZES[dtype]}")
            return float(np.dot(values, values))
        # In parts that stay in the processor's cache while they are converted, which saves most of the time.
        stored = np.frombuffer(block, "<f2" if dtype == "F16" else "<u2")
        total = 0.0
        for start in range(0, len(stored), _CONVERTED):
            part = stored[start : start + _CONVERTED]
            # A bfloat16 is the upper half of a float32.
            wide = part.astype(np.float32) if dtype == "F16" else (part.astype("<u4") << 16).view("<f4")
            total += float(np.dot(wide, wide))
        return total


def _entry(fields: Any) -> TensorEntry:
    begin, end = fields["data_offsets"]
    entry = TensorEntry(str(fields["dtype"]), tuple(fields["shape"]), begin, end)
    if not all(type(number) is int and number >= 0 for number in (*entry.shape, begin, end)):
        raise ValueError("sizes and offsets are integers")
    return entry


def _check_layout(name: str, tensors: dict[str, TensorEntry], size: int) -> None:
    position = 0
    for tensor, entry in tensors.items():
        if entry.dtype not in SIZES:
            raise WeightsRejected(
                f"{tensor} in {name} has the dtype {entry.dtype[:20]!r}, which no engine here loads"
            )
        if entry.begin != position or entry.end - entry.begin != math.prod(entry.shape) * SIZES[entry.dtype]:
            raise WeightsRejected(f"{tensor} in {name} does not have the bytes that its shape takes")
        position = entry.end
    if position != size:
        raise WeightsRejected(f"{name} has {size} bytes of tensors where its header says {position}: it is truncated")
