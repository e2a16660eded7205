"""Packed arrays for blobs: int32 token ids and float32 log-probabilities, little-endian."""

from __future__ import annotations

import struct
from collections.abc import Sequence

_WIDTH = 4


def pack_ids(ids: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(ids)}i", *ids)


def unpack_ids(blob: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{len(blob) // _WIDTH}i", blob)


def pack_logprobs(logprobs: Sequence[float]) -> bytes:
    """Rounds to float32, which is what engines compute in."""
    return struct.pack(f"<{len(logprobs)}f", *logprobs)


def unpack_logprobs(blob: bytes) -> tuple[float, ...]:
    return struct.unpack(f"<{len(blob) // _WIDTH}f", blob)
