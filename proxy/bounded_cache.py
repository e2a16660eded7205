"""A mapping of bounded size, which forgets the entries that were used least recently."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, ItemsView
from typing import Generic, TypeVar

_Key = TypeVar("_Key", bound=Hashable)
_Value = TypeVar("_Value")


class BoundedCache(Generic[_Key, _Value]):
    """Entries with a total weight of at most `most`. Without `weigh` each entry weighs 1, so `most` is a number.

    `evicted` is called with every entry that is removed for lack of room, but not with those that are dropped. Not
    safe for threads: callers that share a cache between threads use a lock of their own.
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
        """Return whether there is an entry, without counting this as a use."""
        return key in self._entries

    def get(self, key: _Key) -> _Value | None:
        """Return the value and count it as used; None where there is none."""
        value = self._entries.get(key)
        if value is not None:
            self._entries.move_to_end(key)
        return value

    def put(self, key: _Key, value: _Value) -> None:
        """Set the value, count this as a use, and evict the least recently used entries until the rest fit. An entry
        that is heavier than the bound is evicted itself."""
        if key in self._entries:
            self.drop(key)
        self._entries[key] = value
        self._weight += 1 if self._weigh is None else self._weigh(value)
        while self._weight > self._most:
            oldest, leaving = self._entries.popitem(last=False)
            self._weight -= 1 if self._weigh is None else self._weigh(leaving)
            if self._evicted is not None:
                self._evicted(oldest, leaving)

    def drop(self, key: _Key) -> None:
        """Remove the entry, if there is one."""
        value = self._entries.pop(key, None)
        if value is not None:
            self._weight -= 1 if self._weigh is None else self._weigh(value)

    def clear(self) -> None:
        """Remove all entries."""
        self._entries.clear()
        self._weight = 0

    def items(self) -> ItemsView[_Key, _Value]:
        """Return a live view of all entries, the least recently used first."""
        return self._entries.items()
