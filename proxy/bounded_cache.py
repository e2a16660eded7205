"""A mapping of bounded size, which forgets the entries that were used least recently."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, ItemsView
from typing import Generic, TypeVar

_Key = TypeVar("_Key", bound=Hashable)
_Value = TypeVar("_Value")


class BoundedCache(Generic[_Key, _Value]):
    """Entries whose weights together are at most `most`; without `weigh` each weighs 1, so `most` is their number.

    `evicted` is called with every entry that leaves because there is no room, not with those that are dropped. One
    thread at a time: callers that share a cache between threads hold a lock of their own.
    """

    def __init__(
        self,
        most: int,
        *,
        weigh: Callable[[_Value], int] | None = None,
        evicted: Callable[[_Key, _Value], None] | None = None,
    ) -> None:
        self._most = most
        self._weigh = weigh
        self._evicted = evicted
        self._weight = 0
        self._entries: OrderedDict[_Key, _Value] = OrderedDict()
        """The most recently used last."""

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: _Key) -> bool:
        """Whether there is an entry; looking is not using it."""
        return key in self._entries

    def get(self, key: _Key) -> _Value | None:
        """Return the value and count it as used; None where there is none."""
        value = self._entries.get(key)
        if value is not None:
            self._entries.move_to_end(key)
        return value

    def put(self, key: _Key, value: _Value) -> None:
        """Set the value, count it as used, and evict others as long as there is no room. An entry that is heavier
        than the whole bound does not stay."""
        self.drop(key)
        self._entries[key] = value
        self._weight += self._weight_of(value)
        while self._weight > self._most:
            oldest, leaving = self._entries.popitem(last=False)
            self._weight -= self._weight_of(leaving)
            if self._evicted is not None:
                self._evicted(oldest, leaving)

    def drop(self, key: _Key) -> None:
        """Forget the entry, if there is one."""
        value = self._entries.pop(key, None)
        if value is not None:
            self._weight -= self._weight_of(value)

    def clear(self) -> None:
        """Forget all entries."""
        self._entries.clear()
        self._weight = 0

    def items(self) -> ItemsView[_Key, _Value]:
        """Return a live view of all entries, the least recently used first."""
        return self._entries.items()

    def _weight_of(self, value: _Value) -> int:
        return 1 if self._weigh is None else self._weigh(value)
