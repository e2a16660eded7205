"""What a process remembers of sessions, so that a model call finds its own without a look at the store.

It is a cache and bounded: what is not here is in the store. Of a session, only that it is open can change, once and
for good. Its end in this process is heard of at once (`forget`); for ends by other processes, nothing is taken for
open longer than `FRESH_SECONDS` after it was last seen so.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Generic, TypeVar

import msgspec

from proxy.clock import Clock
from proxy.contract.identifiers import KeyId, RunId, SessionId
from proxy.sessions.identification import SessionContext

FRESH_SECONDS = 1.0

_SESSIONS = 16_384
_CONVERSATIONS = 65_536
_EQUAL_CONVERSATIONS = 256
"""Sessions of one conversation that are remembered."""

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


class KnownSession(msgspec.Struct, kw_only=True):
    """`seen_open_at`: when it was last known to be open; None once it has ended."""

    context: SessionContext
    external_id: str | None
    seen_open_at: float | None

    @property
    def is_open(self) -> bool:
        return self.seen_open_at is not None


class Look(msgspec.Struct, frozen=True):
    """When the store was looked at, and how often `forget` had been called before."""

    at: float
    forgotten: int


class _Holder(msgspec.Struct, kw_only=True):
    """A session that holds a conversation: how often it was continued from there, and whether it holds it exactly."""

    times: int = 0
    exact: bool


class SessionMemory:
    """Sessions by id, by name, and by the conversations that they hold."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._times_forgotten = 0
        self._forgotten: _Bounded[str, int] = _Bounded(_SESSIONS)
        self._erased: _Bounded[str, bool] = _Bounded(_SESSIONS)
        self._sessions: _Bounded[SessionId, KnownSession] = _Bounded(_SESSIONS)
        self._names: _Bounded[tuple[RunId, str], tuple[SessionId, float]] = _Bounded(_SESSIONS)
        self._conversations: _Bounded[tuple[KeyId, bytes], dict[SessionId, _Holder]] = _Bounded(_CONVERSATIONS)

    def look(self) -> Look:
        """To be called before the store is read, and given to what takes in the result."""
        return Look(self._clock(), self._times_forgotten)

    def put(self, context: SessionContext, *, external_id: str | None, is_open: bool, look: Look) -> KnownSession:
        """Takes in a session as the store had it."""
        seen = 0.0 if self._is_outdated(context.id, look) else look.at
        known = KnownSession(context=context, external_id=external_id, seen_open_at=seen if is_open else None)
        if not self._erased.get(context.id):
            self._sessions.put(context.id, known)
        return known

    def put_name(self, run_id: RunId, name: str, session_id: SessionId, look: Look) -> None:
        """That session is the newest of this name."""
        self._names.put((run_id, name), (session_id, look.at))

    def by_id(self, session_id: SessionId) -> KnownSession | None:
        """What never changes of it is right; whether it is open may not be."""
        return self._sessions.get(session_id)

    def by_name(self, run_id: RunId, name: str) -> KnownSession | None:
        """The session of that id or the newest of that name, if that is certain."""
        known = self._sessions.get(SessionId(name))
        if known is not None and known.context.run_id == run_id:
            return known
        session_id, seen_at = self._names.get((run_id, name)) or (None, 0.0)
        known = self._sessions.get(session_id) if session_id is not None else None
        if known is None:
            return None
        if known.is_open:
            return known if self._is_fresh(known) else None
        return known if self._clock() - seen_at < FRESH_SECONDS else None

    def has_heard_of(self, run_id: RunId, name: str) -> bool:
        return self._names.get((run_id, name)) is not None

    def seen_open(self, session_id: SessionId, look: Look) -> None:
        """It was open at that look."""
        known = self._sessions.get(session_id)
        if known is not None and known.is_open and not self._is_outdated(session_id, look):
            known.seen_open_at = look.at

    def forget(self, session_ids: Iterable[str]) -> None:
        """They may have ended: the next call looks."""
        self._times_forgotten += 1
        for session_id in session_ids:
            self._forgotten.put(session_id, self._times_forgotten)
            known = self._sessions.get(SessionId(session_id))
            if known is not None and known.is_open:
                known.seen_open_at = 0.0

    def erase(self, session_ids: Iterable[str]) -> None:
        """They are not to be known any more."""
        for session_id in session_ids:
            self._erased.put(session_id, True)
            self._sessions.drop(SessionId(session_id))

    # Conversations

    def put_conversation(
        self, key_id: KeyId, conversation: bytes, times: Mapping[SessionId, int], *, exact: bool
    ) -> None:
        """These sessions hold it, as the store had it, and so often was each continued from there. Not `exact`: but
        for a message that was sent last."""
        kept = self._conversations.get((key_id, conversation)) or {}
        holders: dict[SessionId, _Holder] = {}
        for session_id, count in list(times.items())[:_EQUAL_CONVERSATIONS]:
            known = kept.get(session_id)
            counted = count if known is None else max(count, known.times)
            holders[session_id] = _Holder(times=counted, exact=exact or (known is not None and known.exact))
        self._conversations.put((key_id, conversation), holders)

    def add_conversation(
        self, key_id: KeyId, conversation: bytes, session_id: SessionId, *, exact: bool = True
    ) -> None:
        """One more session holds it. A session of which others may hold it too, unheard of here, is still found."""
        holders = self._conversations.get((key_id, conversation))
        if holders is None:
            self._conversations.put((key_id, conversation), {session_id: _Holder(exact=exact)})
        elif session_id in holders:
            holders[session_id].exact |= exact
        elif len(holders) < _EQUAL_CONVERSATIONS:
            holders[session_id] = _Holder(exact=exact)

    def continued(self, key_id: KeyId, conversation: bytes) -> KnownSession | None:
        """The session, open or ended, that a call continues from this conversation; None where that is not certain.

        Of several that hold it, one that does exactly; then one without a name before those whose calls usually have
        one; then that which was continued from here least often; then an open one; then the first. So equal
        conversations that run in parallel go on apart.
        """
        chosen: tuple[KnownSession, _Holder] | None = None
        best = (False, False, 0, False)
        for session_id, holder in (self._conversations.get((key_id, conversation)) or {}).items():
            known = self._sessions.get(session_id)
            if known is None or not self._is_fresh(known):
                return None
            rank = (not holder.exact, known.external_id is not None, holder.times, not known.is_open)
            if chosen is None or rank < best:
                chosen, best = (known, holder), rank
        if chosen is None:
            return None
        chosen[1].times += 1
        return chosen[0]

    def _is_outdated(self, session_id: SessionId, look: Look) -> bool:
        """Whether it may have ended since."""
        return (self._forgotten.get(session_id) or 0) > look.forgotten

    def _is_fresh(self, known: KnownSession) -> bool:
        return known.seen_open_at is None or self._clock() - known.seen_open_at < FRESH_SECONDS


class _Bounded(Generic[_Key, _Value]):
    """The least recently used leave first."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._values: OrderedDict[_Key, _Value] = OrderedDict()

    def get(self, key: _Key) -> _Value | None:
        value = self._values.get(key)
        if value is not None:
            self._values.move_to_end(key)
        return value

    def drop(self, key: _Key) -> None:
        self._values.pop(key, None)

    def put(self, key: _Key, value: _Value) -> None:
        self._values[key] = value
        self._values.move_to_end(key)
        if len(self._values) > self._size:
            self._values.popitem(last=False)
