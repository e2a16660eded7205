"""Remember the state of a reader after the beginning of a list, by the bytes of that beginning.

Clients send the whole conversation with every call, and write earlier elements in the same bytes as before. Where the
meaning of an element depends on the elements before it, the reader's state at the end of a list is remembered, and a
longer list is read from there.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from hashlib import sha256
from typing import Generic, TypeVar

import msgspec

from proxy.bounded_cache import BoundedCache

_State = TypeVar("_State")

# A known beginning is searched up to this many elements before the end of a list.
_LOOK_BACK = 64

# Bytes of the longest list whose state is remembered. In memory, a text may take four times its bytes.
_LARGEST = 1 << 23


class Beginning(msgspec.Struct, Generic[_State], frozen=True):
    """The known beginning of a list: its first `count` elements, and the reader's `state` after them, None if no
    beginning is known. `key` and `size` are those of the whole list."""

    count: int
    state: _State | None
    key: bytes
    size: int


class Remembered(Generic[_State]):
    """States by the digest of the bytes that led to them, without who sent these bytes. Threads may share it.

    Bounded by the bytes of the lists: the least recently used states are dropped first, and such lists are read
    again.
    """

    def __init__(self, most_bytes: int = 1 << 26) -> None:
        self._most_bytes = most_bytes
        self._lock = threading.Lock()  # states and the order of their use change together
        self._states: BoundedCache[bytes, tuple[int, _State]] = BoundedCache(most_bytes, weigh=lambda entry: entry[0])

    def beginning(self, seed: bytes, elements: Sequence[msgspec.Raw]) -> Beginning[_State]:
        """Return the longest known beginning of a list. `seed` stands for the state in which the reader began."""
        count = max(0, len(elements) - _LOOK_BACK)
        text = b",".join((sha256(seed).digest(), *elements[:count]))
        hasher, size = sha256(text), len(text)
        known: tuple[int, _State | None] = (0, None)
        # One pass: the digest of each longer beginning continues that of the one before.
        while True:
            key = hasher.digest()
            state = self.get(key)
            if state is not None:
                known = (count, state)
            if count == len(elements):
                return Beginning(*known, key, size)
            text = b"," + elements[count]
            hasher.update(text)
            size += len(text)
            count += 1

    def get(self, key: bytes) -> _State | None:
        with self._lock:
            known = self._states.get(key)
            return known[1] if known is not None else None

    def clear(self) -> None:
        with self._lock:
            self._states.clear()

    def put(self, key: bytes, state: _State, *, size: int) -> None:
        """Remember the state of a list unless it is known; nobody may change the state afterwards.

        The state of a very long list is not remembered: it would displace many others.
        """
        with self._lock:
            if key not in self._states and size <= min(self._most_bytes, _LARGEST):
                self._states.put(key, (size, state))
