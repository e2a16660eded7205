"""What was read of the beginnings of lists, known by their bytes.

Clients send the whole conversation with every call, and write what they sent before in the same bytes. Where what an
element stands for depends on those before it, the state in which a reader left a list is kept, and a longer list is
read from there.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from hashlib import sha256
from typing import Generic, TypeVar

import msgspec

from proxy.bounded_cache import BoundedCache

_State = TypeVar("_State")

_LOOK_BACK = 64
"""How many elements before the end a known beginning is looked for."""

_LARGEST = 1 << 23
"""Bytes that one state may stand for. A text may take four bytes in memory for one that was sent."""


class Beginning(msgspec.Struct, Generic[_State], frozen=True):
    """Of a list, its first `count` elements, and the `state` behind them, None where none are known. `key` and `size`
    are those of the whole list."""

    count: int
    state: _State | None
    key: bytes
    size: int


class Remembered(Generic[_State]):
    """States by the bytes that led to them; nothing of who sent them. Bounded by the bytes that they stand for, the
    least recently used leave first: what is forgotten is read again. Threads may share it."""

    def __init__(self, most_bytes: int = 1 << 26) -> None:
        self._most_bytes = most_bytes
        self._lock = threading.Lock()  # the states and their order change together
        self._states: BoundedCache[bytes, tuple[int, _State]] = BoundedCache(most_bytes, weigh=lambda entry: entry[0])

    def beginning(self, seed: bytes, elements: Sequence[msgspec.Raw]) -> Beginning[_State]:
        """The longest beginning that is known. `seed` is what the reader began with."""
        count = max(0, len(elements) - _LOOK_BACK)
        text = b",".join((sha256(seed).digest(), *elements[:count]))
        hasher, size = sha256(text), len(text)
        known: tuple[int, _State | None] = (0, None)
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
        """Remember the state of the list, or of what else the key stands for, unless one is known already; nobody may
        change what it holds. A state of a very long list is not worth the many that it would push out."""
        with self._lock:
            if key not in self._states and size <= min(self._most_bytes, _LARGEST):
                self._states.put(key, (size, state))
