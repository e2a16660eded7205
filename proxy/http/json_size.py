"""The number of values and of escapes in a JSON text, found without decoding it.

Decoding takes time and memory by the number of values: 32 MiB of empty lists are 2 s and 1 GB. Counting them in C,
piece by piece, takes 0.1 s and no memory, so a body is counted before it is decoded. A text of 32 MiB of escapes is
0.2 s of one call of the decoder, in which no other thread runs; without escapes it is 0.01 s.
"""

from __future__ import annotations

_PIECE = 1 << 20
"""Bytes that one C call looks at. The interpreter's lock is free between two calls: other threads wait for one piece
at most, about a millisecond."""

_MARKS = (b",", b"{", b"[")
"""Every value but the first of a list or object follows a comma; the first follows a bracket."""


def has_more_escapes(text: bytes, most: int) -> bool:
    """Whether a text has more than `most` backslashes."""
    count = 0
    for start in range(0, len(text), _PIECE):
        count += text.count(b"\\", start, start + _PIECE)
        if count > most:
            return True
    return False


def has_more_values(text: bytes, most: int) -> bool:
    """Whether a JSON text has more than `most` values below its outermost one. An empty list or object counts as two.

    The text need not be valid JSON: what the decoder would refuse has any number.
    """
    if _marks_in(text, most) <= most:  # those inside of strings included
        return False
    return _values_outside_strings(text, most) > most


def _marks_in(text: bytes, most: int) -> int:
    count = 0
    for start in range(0, len(text), _PIECE):
        count += sum(text.count(mark, start, start + _PIECE) for mark in _MARKS)
        if count > most:
            break
    return count


def _values_outside_strings(text: bytes, most: int) -> int:
    """The exact number, up to a number above `most`."""
    count = quotes = 0
    in_string, escape = False, b""
    for start in range(0, len(text), _PIECE):
        piece = escape + text[start : start + _PIECE]
        escape = b""
        if b"\\" in piece:
            piece = piece.replace(b"\\\\", b"")
            if piece.endswith(b"\\"):  # it escapes the first character of the next piece
                piece, escape = piece[:-1], b"\\"
            piece = piece.replace(b'\\"', b"")
        found = piece.count(b'"')
        quotes += found
        if quotes > 4 * most + 4:  # a key and a string for every value: split only what is bounded
            return most + 1
        outside = b"".join(piece.split(b'"')[in_string::2])
        count += sum(outside.count(mark) for mark in _MARKS)
        if count > most:
            return count
        in_string ^= bool(found % 2)
    return count
