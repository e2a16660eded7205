"""Packed arrays, as they are stored and handed to trainers: token ids, float32 log-probabilities; little-endian."""

from __future__ import annotations

import struct
from collections.abc import Sequence

_WIDTH = 4
_SPLIT, _NARROW, _WIDE = b"\x02", b"\x03", b"\x04"
_PAIR = 0b11


def pack_ids(ids: Sequence[int]) -> bytes:
    """Int32 ids as a byte that says how, and

    - 2: where all are below 2^18, as in the vocabularies that are in use: the lower 16 bits of each, then the upper
      two bits, of four ids in a byte, the first lowest;
    - 3: below 2^24, three bytes each;
    - 4: four bytes each.

    Nothing for none.
    """
    packed = struct.pack(f"<{len(ids)}i", *ids)
    if not packed:
        return b""
    if packed[3::_WIDTH].strip(b"\0"):
        return _WIDE + packed
    upper = packed[2::_WIDTH]
    if max(upper) > _PAIR:
        narrow = bytearray(packed)
        del narrow[3::_WIDTH]
        return _NARROW + narrow
    lower = bytearray(2 * len(ids))
    lower[0::2], lower[1::2] = packed[0::_WIDTH], packed[1::_WIDTH]
    return _SPLIT + lower + _fourfold(upper)


def count_ids(blob: bytes) -> int:
    """How many `pack_ids` packed. Raises ValueError for what it did not make."""
    if not blob:
        return 0
    how, size = blob[:1], len(blob) - 1
    if how == _SPLIT and size and size % 9 in _SPLIT_RESTS:
        return 4 * (size // 9) + _SPLIT_RESTS[size % 9]
    width = {_NARROW: 3, _WIDE: _WIDTH}.get(how)
    if width is None or not size or size % width:
        raise ValueError(f"{len(blob)} bytes that begin with {how!r} are no packed token ids")
    return size // width


def widened_ids(blob: bytes) -> bytes:
    """What `pack_ids` made as plain int32. Raises ValueError for anything else."""
    count = count_ids(blob)
    how, body = blob[:1], blob[1:]
    if how == _SPLIT:
        wide = bytearray(_WIDTH * count)
        wide[0::_WIDTH], wide[1::_WIDTH] = body[0 : 2 * count : 2], body[1 : 2 * count : 2]
        wide[2::_WIDTH] = _unfolded(body[2 * count :], count)
        return bytes(wide)
    if how == _NARROW:
        wide = bytearray(_WIDTH * count)
        for place in range(3):
            wide[place::_WIDTH] = body[place::3]
        return bytes(wide)
    return body


_SPLIT_RESTS = {0: 0, 3: 1, 5: 2, 7: 3}
"""Four ids take nine bytes; by the bytes beyond whole fours, the ids beyond them."""


def _fourfold(values: bytes) -> bytes:
    """Bytes below four, four of them in one."""
    size = -(-len(values) // 4)
    number = 0
    for place in range(4):  # as numbers, all bytes at once: none has a carry
        number |= int.from_bytes(values[place::4], "little") << 2 * place
    return number.to_bytes(size, "little")


def _unfolded(folded: bytes, count: int) -> bytes:
    """`count` bytes below four."""
    return b"".join([_FOURS[byte] for byte in folded])[:count]


_FOURS = [bytes((byte & 3, byte >> 2 & 3, byte >> 4 & 3, byte >> 6)) for byte in range(256)]


def unpack_ids(blob: bytes) -> tuple[int, ...]:
    """Raises ValueError for what `pack_ids` did not make."""
    wide = widened_ids(blob)
    return struct.unpack(f"<{len(wide) // _WIDTH}i", wide)


def pack_logprobs(logprobs: Sequence[float]) -> bytes:
    """Rounds to float32, which is what engines compute in."""
    return struct.pack(f"<{len(logprobs)}f", *logprobs)


def count_logprobs(blob: bytes) -> int:
    """How many `pack_logprobs` packed. Raises ValueError for what it did not make."""
    if len(blob) % _WIDTH:
        raise ValueError(f"{len(blob)} bytes are no packed log-probabilities")
    return len(blob) // _WIDTH


def unpack_logprobs(blob: bytes) -> tuple[float, ...]:
    return struct.unpack(f"<{len(blob) // _WIDTH}f", blob)
