"""What was read of the beginnings of lists, known by their bytes.

Clients send the whole conversation with every call, and write what they sent before in the same bytes. Where what an
element stands for depends on those before it, the state in which a reader left a list is kept, and a longer list is
read from there.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from hashlib import sha256
from typing import Generic, TypeVar

import msgspec

_State = TypeVar("_State")

_LOOK_BACK = 64
"""How many elements before the end a known beginning is looked for."""


class Remembered(Generic[_State]):
    """States by the bytes that led to them; nothing of who sent them. Bounded by the bytes that they stand for, the
    least recently used leave first: what is forgotten is read again."""

    def __init__(self, most_bytes: int = 1 << 26) -> None:
        self._most_bytes = most_bytes
        self._bytes = 0
        self._states: OrderedDict[bytes, tuple[int, _State]] = OrderedDict()

    def beginning(self, seed: bytes, elements: Sequence[msgspec.Raw]) -> tuple[int, _State] | None:
        """The longest beginning that is known, as the number of its elements and the state behind it. `seed` is what
        the reader began with."""
        count = max(0, len(elements) - _LOOK_BACK)
        hasher = sha256(seed + b"".join(b"," + element for element in elements[:count]))
        found: tuple[int, _State] | None = None
        while True:
            state = self.get(hasher.digest())
            if state is not None:
                found = (count, state)
            if count == len(elements):
                return found
            hasher.update(b"," + elements[count])
            count += 1

    def keep(self, seed: bytes, elements: Sequence[msgspec.Raw], state: _State) -> None:
        """`state` is behind all of `elements`; nobody may change what it holds."""
        text = seed + b"".join(b"," + element for element in elements)
        self.put(sha256(text).digest(), state, size=len(text))

    def get(self, key: bytes) -> _State | None:
        """What was put under this key."""
        known = self._states.get(key)
        if known is None:
            return None
        self._states.move_to_end(key)
        return known[1]

    def put(self, key: bytes, state: _State, *, size: int) -> None:
        """The same, under a key that stands for it otherwise. What is known of the key stays."""
        if key in self._states or size > self._most_bytes:
            return
        self._states[key] = (size, state)
        self._bytes += size
        while self._bytes > self._most_bytes:
            self._bytes -= self._states.popitem(last=False)[1][0]
