"""Token ids of a conversation that grows at its end, with their stored and their sent form."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import overload

_WIDTH = 4


class TokenIds(Sequence[int]):
    """An immutable sequence of int32 ids. `packed` is little-endian, `json` a JSON array.

    Appending costs a copy of the bytes and the work for the appended ids: ids that were once written as JSON are not
    written again. It equals any sequence of the same ids.
    """

    __slots__ = ("_absent", "_written", "packed")

    def __init__(self, packed: bytes = b"", absent: frozenset[int] = frozenset()) -> None:
        self.packed = packed
        self._absent = absent
        self._written = (0, b"")
        """The number of leading ids that have been written as text, and that text."""

    @classmethod
    def of(cls, ids: Iterable[int]) -> TokenIds:
        """Return `ids` as TokenIds. Raise struct.error for an id that is no int32."""
        if isinstance(ids, TokenIds):
            return ids
        values = ids if isinstance(ids, tuple) else tuple(ids)
        return cls(struct.pack(f"<{len(values)}i", *values))

    @property
    def json(self) -> bytes:
        return b"[%b]" % self._comma_separated()

    @property
    def unwritten(self) -> int:
        """The number of ids that `json` would write as text for the first time."""
        return len(self) - self._written[0]

    def _comma_separated(self) -> bytes:
        count, text = self._written
        if count < len(self):
            rest = struct.unpack_from(f"<{len(self) - count}i", self.packed, count * _WIDTH)
            rest_text = ",".join(map(str, rest)).encode()
            text = b",".join((text, rest_text)) if count else rest_text
            self._written = (len(self), text)
        return text

    def __len__(self) -> int:
        return len(self.packed) // _WIDTH

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> TokenIds: ...

    def __getitem__(self, index: int | slice) -> int | TokenIds:
        if isinstance(index, int):
            position = range(len(self))[index]
            value: int = struct.unpack_from("<i", self.packed, position * _WIDTH)[0]
            return value
        start, stop, step = index.indices(len(self))
        if step != 1:
            return TokenIds.of(tuple(self)[index])
        if start == 0 and stop == len(self):
            return self
        return TokenIds(self.packed[start * _WIDTH : max(start, stop) * _WIDTH], self._absent)

    def __iter__(self) -> Iterator[int]:
        return iter(struct.unpack(f"<{len(self)}i", self.packed))

    def __contains__(self, token: object) -> bool:
        # Absent ids are cached, also for sequences that extend this one: every turn searches for the same few tokens.
        if not isinstance(token, int) or token in self._absent:
            return False
        try:
            searched = struct.pack("<i", token)
        except struct.error:  # no int32
            return False
        at = self.packed.find(searched)
        while at % _WIDTH and at >= 0:  # a match across two ids is none
            at = self.packed.find(searched, at + 1)
        if at < 0:
            self._absent |= {token}
        return at >= 0

    def __add__(self, more: Iterable[int]) -> TokenIds:
        appended = TokenIds.of(more)
        if not appended.packed:
            return self
        if not self.packed:
            return appended
        absent = self._absent
        if not absent.isdisjoint(appended):
            absent = absent.difference(appended)
        whole = TokenIds(self.packed + appended.packed, absent)
        whole._written = self._written
        return whole

    def __eq__(self, other: object) -> bool:
        if isinstance(other, TokenIds):
            return self.packed == other.packed
        if isinstance(other, tuple | list):
            return list(self) == list(other)
        return NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return f"TokenIds.of({list(self)!r})"

    def common_prefix(self, other: TokenIds) -> int:
        """Return the length of the longest common beginning."""
        bound = min(len(self.packed), len(other.packed))
        if self.packed[:bound] == other.packed[:bound]:
            return bound // _WIDTH
        low, high = 0, bound // _WIDTH
        while high - low > 1:
            middle = (low + high) // 2
            part = slice(low * _WIDTH, middle * _WIDTH)
            if self.packed[part] == other.packed[part]:
                low = middle
            else:
                high = middle
        return low
