"""A process's memory of sessions, which lets a model call find its session without a query.

It is a bounded cache of the store. The only cached fact of a session that changes is whether it is open, and it
changes only once. `forget` records ends in this process at once. Other processes end sessions too, so a session
counts as open for at most `FRESH_SECONDS` after it was last seen open.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import msgspec

from proxy.bounded_cache import BoundedCache
from proxy.clock import Clock
from proxy.contract.identifiers import KeyId, RunId, SessionId, TurnId
from proxy.sessions.identification import SessionContext

FRESH_SECONDS = 1.0

# Bounds on memory: a few hundred bytes for each entry.
_SESSIONS = 16_384
_CONVERSATIONS = 65_536
_TURNS = 65_536
# The newest sessions cached for one conversation, since a benchmark may begin thousands with equal messages.
_EQUAL_CONVERSATIONS = 256

# The `seen_open_at` of a session that `forget` named: so long ago that it must be read again.
_FORGOTTEN = 0.0


class KnownSession(msgspec.Struct, kw_only=True):
    """A cached session. `seen_open_at` is when it was last known to be open; None once it has ended."""

    context: SessionContext
    external_id: str | None
    seen_open_at: float | None

    @property
    def is_open(self) -> bool:
        return self.seen_open_at is not None

    @property
    def may_have_ended(self) -> bool:
        """Whether `forget` named the session since it was last seen open."""
        return self.seen_open_at == _FORGOTTEN


class AsOf(msgspec.Struct, frozen=True):
    """A moment before a query: its time, and the number of calls of `forget` until then.

    The query's result may be older than an end that `forget` records while the query runs; the number shows that.
    """

    at: float
    forgotten: int


class _Holder(msgspec.Struct, kw_only=True):
    """A session that holds a conversation.

    `times` counts the recorded calls that continued it, `begun` those that are still running. `exact` is False if the
    session holds the conversation only without its last message.
    """

    times: int = 0
    begun: int = 0
    exact: bool


class SessionMemory:
    """Sessions by id, by name, by turn, and by the conversations that they hold."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._times_forgotten = 0
        self._forgotten: BoundedCache[str, int] = BoundedCache(_SESSIONS)
        self._erased: BoundedCache[str, bool] = BoundedCache(_SESSIONS)
        self._sessions: BoundedCache[SessionId, KnownSession] = BoundedCache(_SESSIONS)
        self._names: BoundedCache[tuple[RunId, str], tuple[SessionId, float]] = BoundedCache(_SESSIONS)
        self._conversations: BoundedCache[tuple[KeyId, bytes], dict[SessionId, _Holder]] = BoundedCache(
            _CONVERSATIONS
        )
        self._turns: BoundedCache[TurnId, SessionId] = BoundedCache(_TURNS)

    def as_of_now(self) -> AsOf:
        """Return a mark of this moment: take it before a query, and pass it to the method that caches the result."""
        return AsOf(self._clock(), self._times_forgotten)

    def put(self, context: SessionContext, *, external_id: str | None, is_open: bool, as_of: AsOf) -> KnownSession:
        """Cache a session as read from the store."""
        seen = _FORGOTTEN if self._is_outdated(context.id, as_of) else as_of.at
        known = KnownSession(context=context, external_id=external_id, seen_open_at=seen if is_open else None)
        if not self._erased.get(context.id):
            self._sessions.put(context.id, known)
        return known

    def put_name(self, run_id: RunId, name: str, session_id: SessionId, as_of: AsOf) -> None:
        """Cache the newest session of a name."""
        self._names.put((run_id, name), (session_id, as_of.at))

    def by_id(self, session_id: SessionId) -> KnownSession | None:
        """Return the session with this id; it may have ended since."""
        return self._sessions.get(session_id)

    def by_name(self, run_id: RunId, name: str) -> KnownSession | None:
        """Return the session of that id or the newest of that name, if that is certain."""
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

    def has_known_name(self, run_id: RunId, name: str) -> bool:
        """Return whether a session of this name has been cached, even if it may have ended."""
        return self._names.get((run_id, name)) is not None

    def seen_open(self, session_id: SessionId, as_of: AsOf) -> None:
        """Record that the session was open at that moment."""
        known = self._sessions.get(session_id)
        if known is not None and known.is_open and not self._is_outdated(session_id, as_of):
            known.seen_open_at = as_of.at

    def forget(self, session_ids: Iterable[str]) -> None:
        """Record that these sessions may have ended: their next calls query the store."""
        self._times_forgotten += 1
        for session_id in session_ids:
            self._forgotten.put(session_id, self._times_forgotten)
            known = self._sessions.get(SessionId(session_id))
            if known is not None and known.is_open:
                known.seen_open_at = _FORGOTTEN

    def erase(self, session_ids: Iterable[str]) -> None:
        """Drop erased sessions for good."""
        for session_id in session_ids:
            self._erased.put(session_id, True)
            self._sessions.drop(SessionId(session_id))

    # Conversations

    def put_conversation(
        self, key_id: KeyId, conversation: bytes, times: Mapping[SessionId, int], *, exact: Collection[SessionId]
    ) -> None:
        """Cache the sessions that hold a conversation, newest first, each with the number of calls that continued it.

        Sessions that are not in `exact` hold it only without its last message.
        """
        kept = self._conversations.get((key_id, conversation)) or {}
        holders: dict[SessionId, _Holder] = {}
        for session_id, count in list(times.items())[:_EQUAL_CONVERSATIONS]:
            known = kept.get(session_id)
            holders[session_id] = _Holder(
                times=count if known is None else max(count, known.times),
                begun=0 if known is None else known.begun,
                exact=session_id in exact or (known is not None and known.exact),
            )
        self._conversations.put((key_id, conversation), holders)

    def add_conversation(
        self, key_id: KeyId, conversation: bytes, session_id: SessionId, *, exact: bool = True
    ) -> None:
        """Cache one more session that holds the conversation. Others, unknown to this process, may hold it too."""
        holders = self._conversations.get((key_id, conversation))
        if holders is None:
            self._conversations.put((key_id, conversation), {session_id: _Holder(exact=exact)})
        elif session_id in holders:
            holders[session_id].exact |= exact
        else:
            holders[session_id] = _Holder(exact=exact)
            if len(holders) > _EQUAL_CONVERSATIONS:
                del holders[min(holders)]  # ids sort by time of creation, so this is the oldest

    def holders(self, key_id: KeyId, conversation: bytes) -> list[SessionId]:
        """Return the sessions that are known to hold the conversation."""
        return list(self._conversations.get((key_id, conversation)) or ())

    def holds(self, key_id: KeyId, conversation: bytes, session_id: SessionId) -> bool:
        """Return whether that session is known to hold the conversation."""
        return session_id in (self._conversations.get((key_id, conversation)) or {})

    def continued(self, key_id: KeyId, conversation: bytes, traced: SessionId | None = None) -> KnownSession | None:
        """Return the session, open or ended, that a call continues from this conversation; None if that is uncertain.

        If several sessions hold it, these criteria decide, in this order: it is open; the call's trace names it
        (`traced`); it holds the conversation exactly; it has no name (calls of named sessions usually send the name);
        it was continued from here least often, which keeps equal attempts in parallel apart; it is the newest. The
        call counts as a continuation until `settled` records its end.
        """
        chosen: tuple[KnownSession, _Holder] | None = None
        best = (False, False, False, False, 0)
        for session_id, holder in (self._conversations.get((key_id, conversation)) or {}).items():
            known = self._sessions.get(session_id)
            if known is None or not self._is_fresh(known):
                return None
            rank = (
                not known.is_open,
                session_id != traced,
                not holder.exact,
                known.external_id is not None,
                holder.times + holder.begun,
            )
            if chosen is None or rank < best or (rank == best and session_id > chosen[0].context.id):
                chosen, best = (known, holder), rank
        if chosen is None:
            return None
        chosen[1].begun += 1
        return chosen[0]

    def begun(self, key_id: KeyId, conversation: bytes, session_id: SessionId) -> None:
        """Record that a call continues the conversation in this session, as `continued` does."""
        holder = (self._conversations.get((key_id, conversation)) or {}).get(session_id)
        if holder is not None:
            holder.begun += 1

    def settled(self, key_id: KeyId, conversation: bytes, session_id: SessionId, *, recorded: bool) -> None:
        """Record the end of a call that continued the conversation. A failed call does not count as a
        continuation."""
        holder = (self._conversations.get((key_id, conversation)) or {}).get(session_id)
        if holder is not None and holder.begun:
            holder.begun -= 1
            holder.times += recorded

    # Turns

    def put_turn(self, turn_id: TurnId, session_id: SessionId) -> None:
        """Cache the session of a recorded turn."""
        self._turns.put(turn_id, session_id)

    def by_turn(self, run_id: RunId, turn_id: TurnId) -> KnownSession | None:
        """Return the session of a turn, open or ended, if that is certain."""
        session_id = self._turns.get(turn_id)
        known = self._sessions.get(session_id) if session_id is not None else None
        if known is None or known.context.run_id != run_id or not self._is_fresh(known):
            return None
        return known

    def _is_outdated(self, session_id: SessionId, as_of: AsOf) -> bool:
        """Return whether the session may have ended since that moment."""
        return (self._forgotten.get(session_id) or 0) > as_of.forgotten

    def _is_fresh(self, known: KnownSession) -> bool:
        return known.seen_open_at is None or self._clock() - known.seen_open_at < FRESH_SECONDS
