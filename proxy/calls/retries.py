"""Requests that are sent again: answered once. What is running or was answered lately, by what tells it."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Hashable
from weakref import WeakValueDictionary

import msgspec

from proxy.bounded_cache import BoundedCache
from proxy.calls.call import Answer
from proxy.calls.generation import Generation
from proxy.clock import Clock
from proxy.contract.identifiers import SessionId
from proxy.errors import InvalidRequest
from proxy.sessions.identification import SessionContext

_KEPT = 2048
_KEPT_SECONDS = 600.0
_RETRIED_WITHIN = 120.0
"""Seconds after its end that a call without a session's name may be sent again: SDKs wait a minute at most."""
_EQUAL_CALLS = 64
"""How many of them are kept."""
_UNCERTAIN = 2
"""So many answers to equal calls need not be told from more: which one is asked for is not certain."""


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
        self._known: BoundedCache[Hashable, _Kept] = BoundedCache(_KEPT)
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

    def knows(self, body_digest: bytes, session_id: SessionId) -> bool:
        """Return whether this request was answered in the session, or is being answered there."""
        return (session_id, body_digest) in self._known

    def keep(self, key: Hashable, body_digest: bytes, generation: Generation) -> None:
        self._known.put(key, _Kept(self._clock(), body_digest, generation))
        self._keys.setdefault(generation, []).append(key)

    def finished(self, generation: Generation) -> None:
        """`generation` has ended: its answer takes its place, if there is a whole one."""
        for key in self._keys.pop(generation, ()):
            kept = self._known.get(key)
            if kept is None or kept.answer is not generation:
                continue
            if generation.answer is None or generation.abandoned:
                self._known.drop(key)
            else:
                self._known.put(key, msgspec.structs.replace(kept, answer=Replayed(answer=generation.answer)))

    def drop(self, key: Hashable) -> None:
        """What is sent again under it from now on is another request, equal to the one that was kept."""
        self._known.drop(key)

    def forget(self, session_ids: Collection[str]) -> None:
        """Answers that these sessions gave, or are giving."""
        for key in [key for key, kept in self._known.items() if _session_of(kept.answer) in session_ids]:
            self._known.drop(key)


def _session_of(answer: Generation | Replayed) -> str:
    return answer.head.session_id if isinstance(answer, Generation) else answer.answer.session_id


class _Attempt(msgspec.Struct, kw_only=True):
    """A call that named no session, and what became of it. `retry_count` is that of its last sending; without an
    `answer` there is none to be had, without a `session` none was opened. `ended_at` is None while it runs."""

    key: Hashable
    session: SessionContext | None
    retry_count: int
    answer: Generation | Replayed | None
    ended_at: float | None = None

    @property
    def is_lost(self) -> bool:
        """Whether its client surely got no answer: it left, or was told of a failure."""
        return self.answer is None or (isinstance(self.answer, Generation) and self.answer.abandoned)


class UnnamedCalls:
    """Calls that named no session, by what tells equal ones, so that a repeated one opens no second session.

    An agent's attempts at a task begin with equal calls. Which of them is sent again is certain where its client got
    no answer, or where there is but one; else it is not guessed.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._attempts: BoundedCache[Hashable, list[_Attempt]] = BoundedCache(_KEPT)
        self._running: dict[Generation, _Attempt] = {}
        self._repeated: BoundedCache[str, bool] = BoundedCache(_KEPT)
        """Sessions in which a repeated call goes on, while the first attempt may still be ending."""

    def give_up(self, session_id: str) -> bool:
        """Offer the session to no repeated call any more; False where one goes on in it already."""
        if session_id in self._repeated:
            return False
        for attempt in self._running.values():
            if attempt.session is not None and attempt.session.id == session_id:
                attempt.session = None
        return True

    def find(self, key: Hashable, retry_count: int) -> Generation | Replayed | SessionContext | None:
        """What a call that is sent again is a repetition of: its answer, held where it still comes; or, where its
        client got none, its session, in which it then is a new attempt. None: of nothing that is left."""
        attempts = [one for one in self._recent(key) if one.retry_count < retry_count]
        lost = next((one for one in attempts if one.is_lost), None)
        if lost is not None:
            self._attempts.put(key, [one for one in self._attempts.get(key) or () if one is not lost])
            if lost.session is None:
                return None
            self._repeated.put(lost.session.id, True)
            return msgspec.structs.replace(lost.session, is_new=False)
        if len(attempts) != 1:
            return None
        (attempt,) = attempts
        attempt.retry_count = retry_count
        if isinstance(attempt.answer, Generation):
            attempt.answer.hold()
        return attempt.answer

    def keep(self, key: Hashable, session: SessionContext, retry_count: int, generation: Generation) -> None:
        attempt = _Attempt(key=key, session=session, retry_count=retry_count, answer=generation)
        self._running[generation] = attempt
        self._add(attempt)

    def keep_refused(self, key: Hashable, session: SessionContext | None, retry_count: int) -> None:
        """The call was not begun. When it is sent again, it is not taken for an equal one that was answered."""
        now = self._clock()
        self._add(_Attempt(key=key, session=session, retry_count=retry_count, answer=None, ended_at=now))

    def finished(self, generation: Generation) -> None:
        attempt = self._running.pop(generation, None)
        if attempt is None:
            return
        attempt.ended_at = self._clock()
        answer = generation.answer
        attempt.answer = None if answer is None or generation.abandoned else Replayed(answer=answer)
        equal = self._attempts.get(attempt.key) or []
        answered = [one for one in equal if isinstance(one.answer, Replayed)]
        for one in answered[:-_UNCERTAIN]:
            equal.remove(one)

    def forget(self, session_ids: Collection[str]) -> None:
        """What was asked and answered in these sessions."""
        for key, attempts in list(self._attempts.items()):
            kept = [one for one in attempts if one.session is None or one.session.id not in session_ids]
            if not kept:
                self._attempts.drop(key)
            elif len(kept) < len(attempts):
                self._attempts.put(key, kept)

    def _add(self, attempt: _Attempt) -> None:
        self._attempts.put(attempt.key, [*self._recent(attempt.key)[1 - _EQUAL_CALLS :], attempt])

    def _recent(self, key: Hashable) -> list[_Attempt]:
        since = self._clock() - _RETRIED_WITHIN
        return [one for one in self._attempts.get(key) or () if one.ended_at is None or one.ended_at >= since]
