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

    __slots__ = ("_absent", "_count", "_written", "packed")

    def __init__(self, packed: bytes = b"", absent: frozenset[int] = frozenset()) -> None:
        self.packed = packed
        self._absent = absent
        self._count = len(packed) // _WIDTH
        self._written = (0, b"")
        """The number of leading ids that have been written as text, and that text."""

    @classmethod
    def of(cls, ids: Iterable[int]) -> TokenIds:
        """Return `ids` as TokenIds. Raise struct.error for an id that is no int32."""
        if type(ids) is TokenIds:  # `isinstance` asks the abstract base class, which takes ten times as long
            return ids
        values = tuple(ids)
        return cls(struct.pack(f"<{len(values)}i", *values))

    @property
    def json(self) -> bytes:
        return b"[%b]" % self._comma_separated()

    @property
    def unwritten(self) -> int:
        """The number of ids that `json` would write as text for the first time."""
        return self._count - self._written[0]

    def _comma_separated(self) -> bytes:
        count, (written, text) = self._count, self._written
        if written < count:
            rest = struct.unpack_from(f"<{count - written}i", self.packed, written * _WIDTH)
            rest_text = ",".join(map(str, rest)).encode()
            text = b"%b,%b" % (text, rest_text) if written else rest_text
            self._written = (count, text)
        return text

    def unpacked(self) -> tuple[int, ...]:
        """Return the ids as a tuple; costs less than iteration."""
        return struct.unpack(f"<{self._count}i", self.packed)

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> TokenIds: ...

    def __getitem__(self, index: int | slice) -> int | TokenIds:
        count = self._count
        if isinstance(index, int):
            position = range(count)[index]
            value: int = struct.unpack_from("<i", self.packed, position * _WIDTH)[0]
            return value
        start, stop, step = index.indices(count)
        if step != 1:
            return TokenIds.of(self.unpacked()[index])
        if start == 0 and stop == count:
            return self
        return TokenIds(self.packed[start * _WIDTH : max(start, stop) * _WIDTH], self._absent)

    def __iter__(self) -> Iterator[int]:
        return iter(self.unpacked())

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

    def has_any(self, tokens: frozenset[int]) -> bool:
        """Return whether one of these tokens is in the sequence."""
        # Tokens that are known to be absent cost one comparison: every turn of a conversation asks for the same few.
        return not tokens <= self._absent and any(token in self for token in tokens)

    def __add__(self, more: Iterable[int]) -> TokenIds:
        appended = TokenIds.of(more)
        if not appended.packed:
            return self
        if not self.packed:
            return appended
        absent = self._absent
        if absent:
            absent = absent.difference(appended.unpacked())
        whole = TokenIds(self.packed + appended.packed, absent)
        whole._written = self._written
        return whole

    def __eq__(self, other: object) -> bool:
        if isinstance(other, TokenIds):
            return self.packed == other.packed
        if isinstance(other, tuple | list):
            return self.unpacked() == tuple(other)
        return NotImplemented

    def __hash__(self) -> int:
        return hash(self.unpacked())

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
