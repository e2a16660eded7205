"""Finding the session of a model call by the rules of `identification`, or opening one."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import Any, NamedTuple, Protocol

import msgspec

from proxy.auth.access import Principal, Right, covers, require_right
from proxy.auth.service import Credentials
from proxy.clock import Clock
from proxy.contract.identifiers import KeyId, SessionId, TurnId, is_session_id
from proxy.contract.trajectory import Purpose
from proxy.database.unit_of_work import Database
from proxy.errors import Conflict, ModelNotFound, NotFound, PermissionDenied
from proxy.lifecycle.signals import Signals
from proxy.limits.service import Admission
from proxy.runs.service import RunView
from proxy.sessions.growing import GrowingPrompts, LonePrompt
from proxy.sessions.identification import AttributedBy, Name, SessionContext, SessionHints
from proxy.sessions.memory import AsOf, KnownSession, SessionMemory
from proxy.sessions.opening import (
    Opened,
    Opening,
    goes_on_in,
    stays_with_ended,
)
from proxy.sessions.repository import SessionRepository
from proxy.sessions.stored import StoredSessions

# The rules that come before the ids of our answers.
_BEFORE_IDS = (AttributedBy.HEADER, AttributedBy.AGENT_HEADER)

# The newest answers of a call's conversation that are compared with those of an ended session: a call that continues
# an attempt sends the attempt's last answers.
_MAX_ANSWERS = 64

# The steps of a growing prompt that are tried, the longest first: the session of the longest may be gone.
_MAX_STEPS = 4


class SessionObserver(Protocol):
    """Is notified of sessions after their commit, for metrics. It must neither raise nor wait."""

    def session_opened(self, *, attributed_by: str, attempt: int) -> None: ...


class SessionFinder:
    """Finds the session of every model call, in memory where possible: a known session costs no query."""

    def __init__(
        self,
        database: Database,
        credentials: Credentials,
        signals: Signals,
        clock: Clock,
        observer: SessionObserver | None = None,
    ) -> None:
        self._database = database
        self._credentials = credentials
        self._clock = clock
        self._observer = observer
        self._memory = SessionMemory(clock)
        self._stored = StoredSessions(database, self._memory)
        self._growing = GrowingPrompts()
        signals.endings.listen(self._memory.forget)
        signals.erasures.listen(self._memory.erase)
        signals.requested_erasures.listen(self._forget_answers)

    async def identify(
        self, principal: Principal, run: RunView, hints: SessionHints, admission: Admission | None = None
    ) -> SessionContext:
        """Return the session that a model call belongs to by the rules of `identification`; open one if none applies.

        An `admission` must permit every new session. A session key decides over every other name, and a path must
        agree with it. Raise PermissionDenied for a key of another session, NotFound for a run out of the key's scope
        and for an unknown id of ours, RateLimited if a new session is not permitted.
        """
        require_right(principal, Right.CALL)
        if not covers(principal, run):
            raise ModelNotFound(f"there is no model {run.name!r} for this key", param="model")
        if principal.session_id is not None:
            return await self._by_session_key(principal.session_id, run, hints)
        opening = Opening(run=run, key_id=principal.key_id, hints=hints, admission=admission)
        if hints.path is not None:
            return await self._by_name(opening, Name(AttributedBy.PATH, hints.path))
        if hints.named is not None and hints.named.by in _BEFORE_IDS:
            return await self._by_name(opening, hints.named)
        return await self._by_contents(opening, hints)

    def begun_again(self, session: SessionContext) -> None:
        """Record that a call, which `call_ended` reported as failed, is repeated in its session."""
        if session.continues is not None and session.key_id is not None:
            self._memory.begun(session.key_id, session.continues, session.id)

    def call_ended(self, session: SessionContext, *, recorded: bool) -> None:
        """Record the end of a call in the session that `identify` returned for it, with or without a recorded turn.

        Among sessions with equal conversations, the one that was continued least often is continued next. A failed
        call must not count as a continuation: it is repeated in the same session.
        """
        if session.continues is not None and session.key_id is not None:
            self._memory.settled(session.key_id, session.continues, session.id, recorded=recorded)

    def users_of(self, body: Mapping[str, Any]) -> tuple[bytes, ...]:
        """Return the pseudonyms, as stored, of the people on whose behalf a call is made."""
        return self._credentials.pseudonyms_of(body)

    def as_of_now(self) -> AsOf:
        """Return a mark of this moment: take it before a turn is recorded, and pass it to `answered`."""
        return self._memory.as_of_now()

    def answered(
        self,
        session: SessionContext,
        conversation_hash: bytes,
        *,
        settled_hash: bytes | None = None,
        lone_prompt: LonePrompt | None = None,
        answer: str = "",
        turn_id: TurnId | None = None,
        seen_open: AsOf | None,
    ) -> None:
        """Record in memory an answer of this session: calls may continue this conversation, and name this turn.

        `answer` is the text that answered `lone_prompt`, from which a longer prompt may grow. `seen_open` is a moment
        at which the session was still open.
        """
        if seen_open is not None:
            self._memory.seen_open(session.id, seen_open)
        if turn_id is not None:
            self._memory.put_turn(turn_id, session.id)
        if session.key_id is not None:
            self._memory.add_conversation(session.key_id, conversation_hash, session.id)
            if settled_hash is not None:
                self._memory.add_conversation(session.key_id, settled_hash, session.id, exact=False)
            if lone_prompt is not None:
                has_grown = session.continues is not None
                step = self._growing.add(session.key_id, lone_prompt, answer, has_grown=has_grown)
                if step is not None:
                    self._memory.add_conversation(session.key_id, step, session.id)

    async def _by_session_key(self, session_id: SessionId, run: RunView, hints: SessionHints) -> SessionContext:
        known = self._memory.by_id(session_id)
        if known is None or known.may_have_ended:
            known = await self._stored.read_named(run.id, session_id)
        if known is None:
            raise NotFound("the session of this key is no longer there")
        if hints.path is None:
            return _attributed(known, AttributedBy.KEY)
        if hints.path not in (session_id, known.external_id):
            raise PermissionDenied(f"this key belongs to the session {session_id}, not to {hints.path!r}")
        return _attributed(known, AttributedBy.PATH)

    async def _by_contents(self, opening: Opening, hints: SessionHints) -> SessionContext:
        """Apply the rules from 5 to 10."""
        answered = await self._by_turns(opening.run, hints) if hints.turns else None
        if answered is not None and answered.known.is_open:
            return answered.attributed
        if hints.named is not None:
            return await self._by_name(opening, hints.named)
        if hints.conversation_hashes:
            ended = answered.known.context.id if answered is not None else None
            continued = await self._by_conversation(opening.run, opening.key_id, hints, ended)
            if continued is not None:
                return continued
        elif hints.lone_prompt is not None:
            grown = await self._by_growing_prompt(opening.run, opening.key_id, hints.lone_prompt, hints.trace)
            if grown is not None:
                return grown
        traced = Name(AttributedBy.TRACEPARENT, hints.trace) if hints.trace is not None else None
        return await (self._by_name(opening, traced) if traced is not None else self._open(opening, None))

    async def _by_name(self, opening: Opening, name: Name) -> SessionContext:
        run = opening.run
        known = self._memory.by_name(run.id, name.text)
        must_be_read = is_session_id(name.text) or self._memory.has_known_name(run.id, name.text)
        if known is not None and known.may_have_ended:
            known = None  # an id identifies a session for good, but whether it is still open must be read
        if known is None and (must_be_read or opening.admission is not None):
            known = await self._stored.read_named(run.id, name.text)
        if known is not None and (known.is_open or known.context.id == name.text):
            return _attributed(known, name.by)
        if known is not None and await self._goes_on_in(known, opening.hints, name):
            return _attributed(known, name.by)
        if known is None and is_session_id(name.text) and name.by in (AttributedBy.PATH, AttributedBy.HEADER):
            raise NotFound(f"there is no session {name.text!r} in the run {run.name!r}")
        return await self._open(opening, name)

    async def _goes_on_in(self, known: KnownSession, hints: SessionHints, name: Name) -> bool:
        """Return whether a call by the name of an ended session still belongs to that session."""
        session_id = known.context.id
        if hints.repeats is not None and hints.repeats(session_id):
            return True
        if not stays_with_ended(name):
            return False
        newest = _newest(hints)
        return await self._database.read(
            lambda connection: goes_on_in(SessionRepository(connection), session_id, newest)
        )

    async def _by_turns(self, run: RunView, hints: SessionHints) -> _Answered | None:
        """Return the session, open or ended, of the newest recorded turn whose id the call sends.

        A run key may access the whole run, so any of its turns counts; ids of other runs and invented ids do not.
        """
        known = self._memory.by_turn(run.id, hints.turns[0])
        if known is not None:
            return _Answered(known, hints, hints.turns[0])
        found = await self._stored.read_turns(run.id, list(hints.turns))
        newest = next((turn_id for turn_id in hints.turns if turn_id in found), None)
        return _Answered(found[newest], hints, newest) if newest is not None else None

    async def _by_conversation(
        self, run: RunView, key_id: KeyId, hints: SessionHints, ended: SessionId | None
    ) -> SessionContext | None:
        """Return the open session that holds the longest of the call's conversations under this key.

        Return None if only ended sessions hold it: a call that continues the end of one attempt does not belong to
        another attempt with the same beginning. Also return None if `ended`, the session that the call's ids name,
        holds it.
        """
        hashes = hints.conversation_hashes
        traced_id = self._traced(run, hints.trace)
        known, held = self._memory.continued(key_id, hashes[0], traced_id), hashes[0]
        if known is None:
            found = await self._stored.read_conversation(run.id, key_id, hashes)
            if found is None:
                return None
            held = found[0]
            known = self._memory.continued(key_id, held, traced_id) or found[1]
        return self._continuation_of(
            known, held, is_barred=ended is not None and self._memory.holds(key_id, held, ended)
        )

    async def _by_growing_prompt(
        self, run: RunView, key_id: KeyId, prompt: LonePrompt, trace: str | None
    ) -> SessionContext | None:
        """Return the open session with the longest prompt from which this one has grown (`growing`).

        Return None if that prompt belongs to ended sessions only. Only steps that this process recorded are
        considered. If it is uncertain whether their sessions are still open, these are read from the store.
        """
        traced_id = self._traced(run, trace)
        for step in self._growing.continued(key_id, prompt)[:_MAX_STEPS]:
            known = self._memory.continued(key_id, step, traced_id)
            if known is None and await self._stored.refresh(run.id, key_id, step):
                known = self._memory.continued(key_id, step, traced_id)
            if known is not None:
                return self._continuation_of(known, step)
        return None

    def _traced(self, run: RunView, trace: str | None) -> SessionId | None:
        known = self._memory.by_name(run.id, trace) if trace is not None else None
        return known.context.id if known is not None else None

    def _continuation_of(self, known: KnownSession, held: bytes, *, is_barred: bool = False) -> SessionContext | None:
        """Return the session for a call that continues it, or None if it has ended or is barred."""
        context = msgspec.structs.replace(known.context, attributed_by=AttributedBy.CONVERSATION, continues=held)
        if known.is_open and not is_barred:
            return context
        self.call_ended(context, recorded=False)
        return None

    def _forget_answers(self, erased: frozenset[str]) -> None:
        """Drop the text of these sessions' answers from memory."""
        self._growing.drop_where(lambda key_id, step: not erased.isdisjoint(self._memory.holders(key_id, step)))

    async def _open(self, opening: Opening, name: Name | None) -> SessionContext:
        """Open a session on its first call. If several calls name it at the same time, one opens it."""
        if opening.admission is not None:
            await opening.admission.to_open()
        try:
            return await self._find_or_insert(opening, name)
        except Conflict:  # another proxy opened it first: the second attempt finds it
            return await self._find_or_insert(opening, name)

    async def _find_or_insert(self, opening: Opening, name: Name | None) -> SessionContext:
        by = name.by if name is not None else AttributedBy.NEW
        run, as_of = opening.run, self._memory.as_of_now()
        if opening.hints.conversation_hashes:
            opening = msgspec.structs.replace(opening, hints=_newest(opening.hints))
        found, row = await self._database.commit(
            Opened(opening, name, as_of.at),
            order_key=name.text if name is not None else opening.key_id,
        )
        if name is not None and found is not None:
            known = self._stored.remember(found, as_of)
            self._memory.put_name(run.id, name.text, known.context.id, as_of)
            if row is None:
                return _attributed(known, by)
        assert row is not None  # a session is opened if none was found
        context = SessionContext(
            id=row["id"],
            run_id=run.id,
            purpose=Purpose.TRAIN,
            attributed_by=by,
            group_id=row["group_id"],
            key_id=opening.key_id,
            attempt=row["attempt"] if name is not None else None,
        )
        self._memory.put(context, external_id=row["external_id"], is_open=True, as_of=as_of)
        if name is not None:
            self._memory.put_name(run.id, name.text, context.id, as_of)
        if self._observer is not None:
            self._observer.session_opened(attributed_by=by.value, attempt=row["attempt"])
        return msgspec.structs.replace(context, is_new=True)


class _Answered(NamedTuple):
    """The session of a turn whose id a call sends back, with that id."""

    known: KnownSession
    hints: SessionHints
    turn_id: TurnId

    @property
    def attributed(self) -> SessionContext:
        by_previous = self.hints.by_previous and self.turn_id == self.hints.turns[0]
        return _attributed(self.known, AttributedBy.PREVIOUS_RESPONSE if by_previous else AttributedBy.ANSWER_ID)


def _attributed(known: KnownSession, by: AttributedBy) -> SessionContext:
    return msgspec.structs.replace(known.context, attributed_by=by, has_ended=not known.is_open)


def _newest(hints: SessionHints) -> SessionHints:
    """Return the hints with the newest hashes only. They are computed here, because transactions run in other
    threads."""
    return msgspec.structs.replace(hints, conversation_hashes=tuple(islice(hints.conversation_hashes, _MAX_ANSWERS)))
