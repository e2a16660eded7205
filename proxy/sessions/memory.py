"""A process's memory of sessions, by which a model call finds its own session without a query.

It is a bounded cache of the store. The only fact of a session that changes is whether it is open, once and for good.
`forget` reports ends in this process at once; because other processes end sessions too, no session counts as open
longer than `FRESH_SECONDS` after it was last seen open.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import msgspec

from proxy.bounded_cache import BoundedCache
from proxy.clock import Clock
from proxy.contract.identifiers import KeyId, RunId, SessionId, TurnId
from proxy.sessions.identification import SessionContext

FRESH_SECONDS = 1.0

_SESSIONS = 16_384
_CONVERSATIONS = 65_536
_TURNS = 65_536
_EQUAL_CONVERSATIONS = 256
"""How many sessions that hold one conversation are remembered, the newest."""

_FORGOTTEN = 0.0


class KnownSession(msgspec.Struct, kw_only=True):
    """A remembered session. `seen_open_at` is when it was last known to be open; None once it has ended."""

    context: SessionContext
    external_id: str | None
    seen_open_at: float | None

    @property
    def is_open(self) -> bool:
        return self.seen_open_at is not None

    @property
    def may_have_ended(self) -> bool:
        """Whether `forget` named it since it was seen open."""
        return self.seen_open_at == _FORGOTTEN


class Look(msgspec.Struct, frozen=True):
    """The time of a query, and how often `forget` had been called before it."""

    at: float
    forgotten: int


class _Holder(msgspec.Struct, kw_only=True):
    """A session that holds a conversation.

    `times` counts the recorded calls that continued from there, `begun` those that are under way. `exact` is False if
    the session holds the conversation only without a message that was sent last.
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

    def look(self) -> Look:
        """Return the token for a query that begins now: pass it to the method that takes in the result."""
        return Look(self._clock(), self._times_forgotten)

    def put(self, context: SessionContext, *, external_id: str | None, is_open: bool, look: Look) -> KnownSession:
        """Remember a session as the store had it."""
        seen = _FORGOTTEN if self._is_outdated(context.id, look) else look.at
        known = KnownSession(context=context, external_id=external_id, seen_open_at=seen if is_open else None)
        if not self._erased.get(context.id):
            self._sessions.put(context.id, known)
        return known

    def put_name(self, run_id: RunId, name: str, session_id: SessionId, look: Look) -> None:
        """Remember the newest session of a name."""
        self._names.put((run_id, name), (session_id, look.at))

    def by_id(self, session_id: SessionId) -> KnownSession | None:
        """Return the session; whether it is still open is uncertain."""
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

    def has_heard_of(self, run_id: RunId, name: str) -> bool:
        return self._names.get((run_id, name)) is not None

    def seen_open(self, session_id: SessionId, look: Look) -> None:
        """Note that the session was open at that time."""
        known = self._sessions.get(session_id)
        if known is not None and known.is_open and not self._is_outdated(session_id, look):
            known.seen_open_at = look.at

    def forget(self, session_ids: Iterable[str]) -> None:
        """Note that these sessions may have ended: the next call queries the store."""
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
        """Remember which sessions hold a conversation, newest first, and how often each was continued from there.

        Those that are not among `exact` hold it only without a message that was sent last.
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
        """Remember one more session that holds the conversation; more may, unknown to this process."""
        holders = self._conversations.get((key_id, conversation))
        if holders is None:
            self._conversations.put((key_id, conversation), {session_id: _Holder(exact=exact)})
        elif session_id in holders:
            holders[session_id].exact |= exact
        else:
            holders[session_id] = _Holder(exact=exact)
            if len(holders) > _EQUAL_CONVERSATIONS:
                del holders[min(holders)]  # ids sort by the time of creation: the oldest

    def holders(self, key_id: KeyId, conversation: bytes) -> list[SessionId]:
        """Return the sessions that are known to hold the conversation."""
        return list(self._conversations.get((key_id, conversation)) or ())

    def holds(self, key_id: KeyId, conversation: bytes, session_id: SessionId) -> bool:
        """Return whether that session is known to hold the conversation."""
        return session_id in (self._conversations.get((key_id, conversation)) or {})

    def continued(self, key_id: KeyId, conversation: bytes, traced: SessionId | None = None) -> KnownSession | None:
        """Return the session, open or ended, that a call continues from this conversation; None if that is uncertain.

        Several may hold it. Then the one that the call's trace names (`traced`) is taken; else an open one before
        ended ones, one that holds it exactly, one without a name before those whose calls usually bring theirs, the
        one that was continued from here least often, so that equal attempts in parallel go on apart, and the newest.
        The call counts as one that continues until `settled` says what became of it.
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
        """Note that a call continues from the conversation in this session, as `continued` does."""
        holder = (self._conversations.get((key_id, conversation)) or {}).get(session_id)
        if holder is not None:
            holder.begun += 1

    def settled(self, key_id: KeyId, conversation: bytes, session_id: SessionId, *, recorded: bool) -> None:
        """Note the end of a call that continued from the conversation: an attempt that failed does not count."""
        holder = (self._conversations.get((key_id, conversation)) or {}).get(session_id)
        if holder is not None and holder.begun:
            holder.begun -= 1
            holder.times += recorded

    # Turns

    def put_turn(self, turn_id: TurnId, session_id: SessionId) -> None:
        """Remember the session of a recorded turn."""
        self._turns.put(turn_id, session_id)

    def by_turn(self, run_id: RunId, turn_id: TurnId) -> KnownSession | None:
        """Return the session of a turn, open or ended, if that is certain."""
        session_id = self._turns.get(turn_id)
        known = self._sessions.get(session_id) if session_id is not None else None
        if known is None or known.context.run_id != run_id or not self._is_fresh(known):
            return None
        return known

    def _is_outdated(self, session_id: SessionId, look: Look) -> bool:
        """Return whether the session may have ended since."""
        return (self._forgotten.get(session_id) or 0) > look.forgotten

    def _is_fresh(self, known: KnownSession) -> bool:
        return known.seen_open_at is None or self._clock() - known.seen_open_at < FRESH_SECONDS
