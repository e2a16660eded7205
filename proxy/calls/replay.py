"""Requests that are sent again: each is answered once, also when its first answer was lost on the way."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Hashable
from contextlib import AbstractAsyncContextManager, nullcontext
from functools import partial
from weakref import WeakValueDictionary

import msgspec

from proxy.bounded_cache import BoundedCache
from proxy.calls.call import Answer, Caller
from proxy.calls.generation import Generation
from proxy.clock import Clock
from proxy.contract.identifiers import SessionId
from proxy.errors import InvalidRequest
from proxy.sessions.identification import SessionContext, SessionHints
from proxy.turns.service import TrajectoryStore

_MOST_ANSWERS = 2048
# Seconds since its beginning for which an answer is found in memory. SDKs give up after ten minutes by default.
_ANSWER_SECONDS = 600.0
# Seconds after its end for which a call without a session's name is recognised: SDKs wait a minute at most.
_RETRIED_WITHIN = 120.0
# Equal calls without a session's name that are remembered.
_MOST_EQUAL = 64
# With two answered equal calls it is open which of them is repeated; a third tells nothing more.
_AMBIGUOUS = 2

_NO_TURNSTILE = nullcontext()


class Replayed(msgspec.Struct, frozen=True, kw_only=True):
    """The recorded answer to a request that was sent before."""

    answer: Answer


class RequestMarks(msgspec.Struct, frozen=True, kw_only=True):
    """The marks by which a request is recognised when it is sent again.

    `digest` is that of the body. `by_key` stands for the client's Idempotency-Key before the session is known,
    `unnamed` for a call that names no session; each is None where it does not apply. `retry_count` is the SDK's, None
    where it sends none.
    """

    by_key: Hashable | None
    unnamed: Hashable | None
    idempotency_key: str | None
    retry_count: int | None
    digest: bytes

    @classmethod
    def of(cls, caller: Caller, hints: SessionHints, *, names_answer: bool) -> RequestMarks:
        """Return the marks of a request. `names_answer`: it continues a recorded answer, which names its session."""
        key_id, given = caller.principal.key_id, caller.idempotency_key
        names_session = names_answer or hints.name is not None or caller.principal.session_id is not None
        return cls(
            by_key=None if given is None else (key_id, hints.name, given),
            unnamed=None if names_session else (key_id, caller.body_digest),
            idempotency_key=given,
            retry_count=caller.retry_count,
            digest=caller.body_digest,
        )


class ReplayIndex:
    """Recognises requests that are sent again, in four ways; a call tries them in this order:

    1. `find_by_key`: an Idempotency-Key that this process saw, before the session is known.
    2. `find_unnamed`: an SDK's retry of an equal call that named no session, so that it opens no second session.
    3. `find_in_session`: an Idempotency-Key that is recorded with a turn of the session, by any process, or
    4. an SDK's retry of an equal call in this session.

    A call that is found is either still generating (it comes held: `release` it) or answered. Failed and abandoned
    calls are not found: a repetition is a new attempt. What was begun is entered by `keep`, what was refused by
    `keep_refused`; `finished` replaces a generation by its answer. Bounded in number and time.
    """

    def __init__(
        self,
        clock: Clock,
        trajectories: TrajectoryStore,
        *,
        most: int = _MOST_ANSWERS,
        most_equal: int = _MOST_EQUAL,
    ) -> None:
        self._clock = clock
        self._trajectories = trajectories
        self._most_equal = most_equal
        self._answers: BoundedCache[Hashable, _Known] = BoundedCache(most)
        """By `by_key`, and by session and digest."""
        self._keys: dict[Generation, list[Hashable]] = {}
        """The keys in `_answers` of what still generates."""
        # Weak: a lock goes with the last request that waits for it, so their number needs no bound.
        self._turnstiles: WeakValueDictionary[Hashable, asyncio.Lock] = WeakValueDictionary()
        self._attempts: BoundedCache[Hashable, list[_Attempt]] = BoundedCache(most)
        """Calls that named no session, oldest first, by `unnamed`."""
        self._running: dict[Generation, _Attempt] = {}
        self._gone_on: BoundedCache[str, bool] = BoundedCache(most)
        """Sessions in which a repeated call goes on, while the first attempt may still be ending."""

    def turnstile(self, marks: RequestMarks) -> AbstractAsyncContextManager[None]:
        """Let requests with one Idempotency-Key pass one at a time: otherwise two that arrive together would both
        find nothing and both generate. Enter it before `find_by_key`, and leave it after `keep`."""
        if marks.by_key is None:
            return _NO_TURNSTILE  # shared by all calls without a key: it has no state
        lock = self._turnstiles.get(marks.by_key)
        if lock is None:
            self._turnstiles[marks.by_key] = lock = asyncio.Lock()
        return lock

    def find_by_key(self, marks: RequestMarks) -> Generation | Replayed | None:
        """Find the call of this Idempotency-Key. Raise InvalidRequest if the key stands for another request."""
        return None if marks.by_key is None else self._find(marks.by_key, marks.digest)

    def find_unnamed(self, marks: RequestMarks) -> Generation | Replayed | SessionContext | None:
        """Find the call without a session's name that this one repeats. Return its answer or, if its client certainly
        got none, its session: the repetition is a new attempt in it.

        An agent's attempts at a task begin with equal calls. It is certain which of them is repeated if the client of
        one got no answer, or if there is only one; otherwise nothing is found.
        """
        if marks.unnamed is None or not marks.retry_count:
            return None
        attempts = [one for one in self._recent(marks.unnamed) if one.retry_count < marks.retry_count]
        lost = next((one for one in attempts if one.is_lost), None)
        if lost is not None:
            # Each lost attempt is repeated once: the next equal retry belongs to another attempt.
            others = [one for one in self._attempts.get(marks.unnamed) or () if one is not lost]
            self._attempts.put(marks.unnamed, others)
            if lost.session is None:
                return None
            self._gone_on.put(lost.session.id, True)
            return msgspec.structs.replace(lost.session, is_new=False)
        if len(attempts) != 1:
            return None
        (attempt,) = attempts
        # SDKs count up: a later retry of this attempt has a higher count, and an equal count is another client's.
        attempt.retry_count = marks.retry_count
        if isinstance(attempt.answer, Generation):
            attempt.answer.hold()
        return attempt.answer

    async def find_in_session(self, marks: RequestMarks, session_id: SessionId) -> Generation | Replayed | None:
        """Find the call in its session: in the store by its Idempotency-Key, or in memory by its digest."""
        if marks.idempotency_key is not None:
            return await self._recorded(session_id, marks.idempotency_key)
        return self._find((session_id, marks.digest), marks.digest) if marks.retry_count else None

    def answered_in(self, marks: RequestMarks) -> Callable[[SessionId], bool] | None:
        """Return a test for sessions in which this request was answered, or is being answered. None for a request
        that is no retry: its equals are other calls."""
        return partial(self._is_known, marks.digest) if marks.retry_count else None

    def keep(self, marks: RequestMarks, session: SessionContext, generation: Generation) -> None:
        """Enter a call that has begun to generate."""
        if marks.retry_count is not None and generation.head.unrecorded is None:
            self._keep((session.id, marks.digest), marks.digest, generation)
            if marks.unnamed is not None:
                attempt = _Attempt(
                    key=marks.unnamed, session=session, retry_count=marks.retry_count, answer=generation
                )
                self._running[generation] = attempt
                self._add(attempt)
        if marks.by_key is not None:
            self._keep(marks.by_key, marks.digest, generation)

    def keep_refused(self, marks: RequestMarks, session: SessionContext | None) -> None:
        """Enter a call that was refused, so that its retry does not get the answer of an equal call. `session` is
        None where none was opened for it."""
        if marks.retry_count is None:
            return
        if marks.unnamed is not None:
            now = self._clock()
            self._add(
                _Attempt(key=marks.unnamed, session=session, retry_count=marks.retry_count, answer=None, ended_at=now)
            )
        if session is not None:
            # An equal call was answered in this session before; a retry now means the refused call.
            self._answers.drop((session.id, marks.digest))

    def withdraw(self, session_id: str) -> bool:
        """Stop offering a session to repeated calls, because it is about to be removed. Return False if a repeated
        call has already begun in it."""
        if session_id in self._gone_on:
            return False
        # Attempts that still end must not offer the session afterwards.
        for attempt in self._running.values():
            if attempt.session is not None and attempt.session.id == session_id:
                attempt.session = None
        return True

    def finished(self, generation: Generation) -> None:
        """Put the answer of an ended generation in its place; drop it if there is no whole answer."""
        answer = generation.answer
        replayed = None if answer is None or generation.abandoned else Replayed(answer=answer)
        for key in self._keys.pop(generation, ()):
            known = self._answers.get(key)
            if known is None or known.answer is not generation:  # evicted, dropped, or taken by a newer call
                continue
            if replayed is None:
                self._answers.drop(key)
            else:
                self._answers.put(key, msgspec.structs.replace(known, answer=replayed))
        attempt = self._running.pop(generation, None)
        if attempt is not None:
            attempt.ended_at, attempt.answer = self._clock(), replayed
            equal = self._attempts.get(attempt.key) or []
            answered = [one for one in equal if isinstance(one.answer, Replayed)]
            for one in answered[:-_AMBIGUOUS]:
                equal.remove(one)

    def forget(self, session_ids: Collection[str]) -> None:
        """Forget all requests and answers of these sessions, which were erased."""
        for key in [key for key, known in self._answers.items() if _session_of(known.answer) in session_ids]:
            self._answers.drop(key)
        for key, attempts in list(self._attempts.items()):
            rest = [one for one in attempts if one.session is None or one.session.id not in session_ids]
            if not rest:
                self._attempts.drop(key)
            elif len(rest) < len(attempts):
                self._attempts.put(key, rest)

    async def _recorded(self, session_id: SessionId, idempotency_key: str) -> Replayed | None:
        first = await self._trajectories.answered(session_id, idempotency_key)
        if first is None:
            return None
        answer = msgspec.convert(first, Answer)
        if answer.siblings:
            others = await self._trajectories.responses(answer.siblings)
            choices = [choice for other in others for choice in msgspec.convert(other, Answer).choices]
            answer = msgspec.structs.replace(answer, choices=(*answer.choices, *choices))
        return Replayed(answer=answer)

    def _find(self, key: Hashable, digest: bytes) -> Generation | Replayed | None:
        known = self._answers.get(key)
        if known is None or known.since < self._clock() - _ANSWER_SECONDS:
            return None
        if known.digest != digest:
            raise InvalidRequest(
                "this Idempotency-Key was used for another request: send each request under a key of its own",
                param="Idempotency-Key",
            )
        if isinstance(known.answer, Generation):
            if known.answer.abandoned:
                return None
            known.answer.hold()
        return known.answer

    def _is_known(self, digest: bytes, session_id: SessionId) -> bool:
        return (session_id, digest) in self._answers

    def _keep(self, key: Hashable, digest: bytes, generation: Generation) -> None:
        self._answers.put(key, _Known(self._clock(), digest, generation))
        self._keys.setdefault(generation, []).append(key)

    def _add(self, attempt: _Attempt) -> None:
        self._attempts.put(attempt.key, [*self._recent(attempt.key)[1 - self._most_equal :], attempt])

    def _recent(self, key: Hashable) -> list[_Attempt]:
        since = self._clock() - _RETRIED_WITHIN
        return [one for one in self._attempts.get(key) or () if one.ended_at is None or one.ended_at >= since]


class _Known(msgspec.Struct, frozen=True):
    """A call that was begun at `since`, and its answer once it has one."""

    since: float
    digest: bytes
    answer: Generation | Replayed


class _Attempt(msgspec.Struct, kw_only=True):
    """A call that named no session. `retry_count` is that of its last sending. `answer` is None for a call that was
    refused or failed, `session` None if no session was opened, `ended_at` None while the call runs."""

    key: Hashable
    session: SessionContext | None
    retry_count: int
    answer: Generation | Replayed | None
    ended_at: float | None = None

    @property
    def is_lost(self) -> bool:
        """Whether its client surely got no answer: it left, or got an error."""
        return self.answer is None or (isinstance(self.answer, Generation) and self.answer.abandoned)


def _session_of(answer: Generation | Replayed) -> str:
    return answer.head.session_id if isinstance(answer, Generation) else answer.answer.session_id
