"""Packed arrays for blobs: token ids and float32 log-probabilities, little-endian."""

from __future__ import annotations

import struct
from collections.abc import Sequence

_WIDTH = 4
_NARROW, _WIDE = b"\x03", b"\x04"


def pack_ids(ids: Sequence[int]) -> bytes:
    """Int32 ids in a byte that says how wide, 3 or 4, and as many bytes for each: no vocabulary needs the fourth.
    Nothing for none."""
    packed = struct.pack(f"<{len(ids)}i", *ids)
    if not packed:
        return b""
    if packed[_WIDTH - 1 :: _WIDTH].strip(b"\0"):
        return _WIDE + packed
    narrow = bytearray(packed)
    del narrow[_WIDTH - 1 :: _WIDTH]
    return _NARROW + narrow


def widened_ids(blob: bytes) -> bytes:
    """What `pack_ids` made as plain int32. Raises ValueError for anything else."""
    width, body = blob[:1], blob[1:]
    if width == _NARROW and len(body) % (_WIDTH - 1) == 0:
        wide = bytearray(len(body) // (_WIDTH - 1) * _WIDTH)
        for place in range(_WIDTH - 1):
            wide[place::_WIDTH] = body[place :: _WIDTH - 1]
        return bytes(wide)
    if (width == _WIDE and len(body) % _WIDTH == 0) or not blob:
        return body
    raise ValueError(f"{len(blob)} bytes that begin with {width!r} are no packed token ids")


def unpack_ids(blob: bytes) -> tuple[int, ...]:
    """Raises ValueError for what `pack_ids` did not make."""
    wide = widened_ids(blob)
    return struct.unpack(f"<{len(wide) // _WIDTH}i", wide)


def pack_logprobs(logprobs: Sequence[float]) -> bytes:
    """Rounds to float32, which is what engines compute in."""
    return struct.pack(f"<{len(logprobs)}f", *logprobs)


def unpack_logprobs(blob: bytes) -> tuple[float, ...]:
    return struct.unpack(f"<{len(blob) // _WIDTH}f", blob)
