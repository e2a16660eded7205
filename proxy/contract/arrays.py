"""Packed token ids and float32 log-probabilities, as they are stored and sent to trainers; little-endian."""

from __future__ import annotations

import struct
from collections.abc import Sequence

_WIDTH = 4
_SPLIT, _NARROW, _WIDE = b"\x02", b"\x03", b"\x04"
_PAIR = 0b11


def pack_ids(ids: Sequence[int]) -> bytes:
    """Pack int32 ids into a byte that names the layout, followed by the ids in that layout:

    - 2, if all ids are below 2^18, as in the vocabularies in use: the lower 16 bits of each id, then the upper two
      bits of all, four ids to a byte with the first id lowest;
    - 3, if all are below 2^24: three bytes each;
    - 4: four bytes each.

    No ids are packed into no bytes.
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
    """Return the number of ids in the output of `pack_ids`. Raise ValueError for other bytes."""
    if not blob:
        return 0
    layout, size = blob[:1], len(blob) - 1
    if layout == _SPLIT and size and size % 9 in _SPLIT_RESTS:
        return 4 * (size // 9) + _SPLIT_RESTS[size % 9]
    width = {_NARROW: 3, _WIDE: _WIDTH}.get(layout)
    if width is None or not size or size % width:
        raise ValueError(f"{len(blob)} bytes that begin with {layout!r} are not packed token ids")
    return size // width


def widened_ids(blob: bytes) -> bytes:
    """Return the output of `pack_ids` as plain int32. Raise ValueError for other bytes."""
    count = count_ids(blob)
    layout, body = blob[:1], blob[1:]
    if layout == _SPLIT:
        wide = bytearray(_WIDTH * count)
        wide[0::_WIDTH], wide[1::_WIDTH] = body[0 : 2 * count : 2], body[1 : 2 * count : 2]
        wide[2::_WIDTH] = _unfolded(body[2 * count :], count)
        return bytes(wide)
    if layout == _NARROW:
        wide = bytearray(_WIDTH * count)
        for place in range(3):
            wide[place::_WIDTH] = body[place::3]
        return bytes(wide)
    return body


# Four ids take nine bytes. The ids in an incomplete group of four, by the bytes that the group takes.
_SPLIT_RESTS = {0: 0, 3: 1, 5: 2, 7: 3}


def _fourfold(values: bytes) -> bytes:
    """Pack bytes below four, four to a byte."""
    # All bytes at once, as one number: the first shift makes pairs, the second joins two pairs in each fourth byte.
    number = int.from_bytes(values, "little")
    number |= number >> 6
    number |= number >> 12
    return number.to_bytes(len(values), "little")[::4]


def _unfolded(folded: bytes, count: int) -> bytes:
    """Return the first `count` bytes that `_fourfold` packed."""
    return b"".join([_FOURS[byte] for byte in folded])[:count]


_FOURS = [bytes((byte & 3, byte >> 2 & 3, byte >> 4 & 3, byte >> 6)) for byte in range(256)]


def unpack_ids(blob: bytes) -> tuple[int, ...]:
    """Unpack the output of `pack_ids`. Raise ValueError for other bytes."""
    wide = widened_ids(blob)
    return struct.unpack(f"<{len(wide) // _WIDTH}i", wide)


def pack_logprobs(logprobs: Sequence[float]) -> bytes:
    """Pack as float32, the precision that engines report."""
    return struct.pack(f"<{len(logprobs)}f", *logprobs)


def count_logprobs(blob: bytes) -> int:
    """Return the number of values in the output of `pack_logprobs`. Raise ValueError for other bytes."""
    if len(blob) % _WIDTH:
        raise ValueError(f"{len(blob)} bytes are not packed log-probabilities")
    return len(blob) // _WIDTH


def unpack_logprobs(blob: bytes) -> tuple[float, ...]:
    return struct.unpack(f"<{len(blob) // _WIDTH}f", blob)
