"""Requests that are sent again: answered once. What is running or was answered lately, by what tells it."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Hashable
from weakref import WeakValueDictionary

import msgspec

from proxy.chat.call import Answer
from proxy.chat.generation import Generation
from proxy.clock import Clock
from proxy.errors import InvalidRequest

_KEPT = 2048
_KEPT_SECONDS = 600.0


class Replayed(msgspec.Struct, frozen=True, kw_only=True):
    """The recorded answer to a request that was sent before."""

    answer: Answer


class _Kept(msgspec.Struct, frozen=True):
    since: float
    body_digest: bytes
    answer: Generation | Replayed


class RecentAnswers:
    """Bounded in number and time. Failed and abandoned generations are not found: a request repeated after one is a
    new attempt. Of a finished one only the answer is kept."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._known: OrderedDict[Hashable, _Kept] = OrderedDict()
        self._keys: dict[Generation, list[Hashable]] = {}
        self._turnstiles: WeakValueDictionary[Hashable, asyncio.Lock] = WeakValueDictionary()

    def turnstile(self, key: Hashable) -> asyncio.Lock:
        """Of requests with one key at one time, one passes to look and keep before the next looks."""
        lock = self._turnstiles.get(key)
        if lock is None:
            self._turnstiles[key] = lock = asyncio.Lock()
        return lock

    def find(self, key: Hashable, body_digest: bytes) -> Generation | Replayed | None:
        """A generation comes held. Raises InvalidRequest when `key` stands for another request."""
        kept = self._known.get(key)
        if kept is None or kept.since < self._clock() - _KEPT_SECONDS:
            return None
        if kept.body_digest != body_digest:
            raise InvalidRequest("this Idempotency-Key was used for another request", param="Idempotency-Key")
        if isinstance(kept.answer, Generation):
            if kept.answer.abandoned:
                return None
            kept.answer.hold()
        return kept.answer

    def keep(self, key: Hashable, body_digest: bytes, generation: Generation) -> None:
        self._put(key, _Kept(self._clock(), body_digest, generation))
        self._keys.setdefault(generation, []).append(key)

    def finished(self, generation: Generation) -> None:
        """`generation` has ended: its answer takes its place, if there is a whole one."""
        for key in self._keys.pop(generation, ()):
            kept = self._known.get(key)
            if kept is None or kept.answer is not generation:
                continue
            if generation.answer is None or generation.abandoned:
                del self._known[key]
            else:
                self._known[key] = msgspec.structs.replace(kept, answer=Replayed(answer=generation.answer))

    def _put(self, key: Hashable, kept: _Kept) -> None:
        self._known[key] = kept
        self._known.move_to_end(key)
        while len(self._known) > _KEPT:
            self._known.popitem(last=False)
