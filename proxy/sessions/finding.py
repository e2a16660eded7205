"""Finding the session of a model call by the rules of `identification`, or opening one."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple, Protocol

import msgspec

from proxy.auth.http import require
from proxy.auth.service import Credentials, Principal, PrincipalKind
from proxy.clock import Clock
from proxy.contract.identifiers import KeyId, RunId, SessionId, TurnId, is_session_id
from proxy.contract.states import SessionState
from proxy.contract.trajectory import Purpose
from proxy.database.unit_of_work import Database
from proxy.errors import Conflict, NotFound, PermissionDenied
from proxy.lifecycle.signals import Signals
from proxy.limits.service import Admission
from proxy.runs.service import RunView
from proxy.sessions.growing import GrowingPrompts, LonePrompt
from proxy.sessions.identification import AttributedBy, Name, SessionContext, SessionHints
from proxy.sessions.memory import KnownSession, Look, SessionMemory
from proxy.sessions.opening import (
    Opened,
    Opening,
    erased,
    goes_on_in,
    stays_with_ended,
)
from proxy.sessions.repository import AnyRow, ContextRow, SessionRepository

_BEFORE_IDS = (AttributedBy.HEADER, AttributedBy.AGENT_HEADER)
"""The rules that decide before the ids of our answers do."""

_ANSWERS = 64
"""How many answers of a call's conversation are compared with those of an ended session, the newest: what goes on
from an attempt holds its last answers."""

_STEPS = 4
"""How many steps of a growing prompt are tried where the sessions of the longest are gone."""


class SessionObserver(Protocol):
    """Hears of sessions after their commit: metrics. It must not raise and not wait."""

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
        self._growing = GrowingPrompts()
        signals.endings.listen(self._memory.forget)
        signals.erasures.listen(self._memory.erase)
        signals.requested_erasures.listen(self._forget_answers)

    async def identify(
        self, principal: Principal, run: RunView, hints: SessionHints, admission: Admission | None = None
    ) -> SessionContext:
        """Return the session that a model call belongs to by the rules of `identification`; open one if none applies.

        Where there is an `admission`, it is asked before a session is opened.

        A session key decides over every other name; a path must agree with it. Raises PermissionDenied for a key of
        another run or session, NotFound for an unknown id of ours, RateLimited for a session that is not opened.
        """
        require(principal, PrincipalKind.RUN, PrincipalKind.SESSION)
        if principal.run_id != run.id:
            raise PermissionDenied(f"this key belongs to another run than {run.name!r}", param="model")
        if principal.session_id is not None:
            return await self._of_session_key(principal.session_id, run, hints)
        opening = Opening(run=run, key_id=principal.key_id, hints=hints, admission=admission)
        if hints.path is not None:
            return await self._named(opening, Name(AttributedBy.PATH, hints.path))
        if hints.named is not None and hints.named.by in _BEFORE_IDS:
            return await self._named(opening, hints.named)
        return await self._by_contents(opening, hints)

    def begun_again(self, session: SessionContext) -> None:
        """Note that a call which `call_ended` reported as failed begins again in its session."""
        if session.continues is not None and session.key_id is not None:
            self._memory.begun(session.key_id, session.continues, session.id)

    def call_ended(self, session: SessionContext, *, recorded: bool) -> None:
        """Report the end of a call that `identify` found this session for, whether a turn of it was recorded or not.

        Of sessions that hold equal conversations, the one that was continued least often goes on next. An attempt
        that failed must not count there: it is repeated, in the same session.
        """
        if session.continues is not None and session.key_id is not None:
            self._memory.settled(session.key_id, session.continues, session.id, recorded=recorded)

    def users_of(self, body: Mapping[str, Any]) -> tuple[bytes, ...]:
        """Return the pseudonyms, as the store has them, of those on whose behalf a call is made."""
        return self._credentials.pseudonyms_of(body)

    def look(self) -> Look:
        """Return the token to be taken before a turn is recorded, and given to `answered`."""
        return self._memory.look()

    def answered(
        self,
        session: SessionContext,
        conversation_hash: bytes,
        *,
        settled_hash: bytes | None = None,
        lone_prompt: LonePrompt | None = None,
        answer: str = "",
        turn_id: TurnId | None = None,
        seen_open: Look | None,
    ) -> None:
        """Report a recorded answer of this session: calls may go on from this conversation, and name this turn.

        `answer` is the text that was given to `lone_prompt`, which may grow. `seen_open` is the time at which the
        session was still open.
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

    async def _of_session_key(self, session_id: SessionId, run: RunView, hints: SessionHints) -> SessionContext:
        known = self._memory.by_id(session_id)
        if known is None or known.may_have_ended:
            known = await self._look_up(run.id, session_id)
        if known is None:
            raise NotFound("the session of this key is no longer there")
        if hints.path is None:
            return _attributed(known, AttributedBy.KEY)
        if hints.path not in (session_id, known.external_id):
            raise PermissionDenied(f"this key belongs to the session {session_id}, not to {hints.path!r}")
        return _attributed(known, AttributedBy.PATH)

    async def _by_contents(self, opening: Opening, hints: SessionHints) -> SessionContext:
        """Apply rules 5 to 10."""
        answered = await self._of_turns(opening.run, hints) if hints.turns else None
        if answered is not None and answered.known.is_open:
            return answered.attributed
        if hints.named is not None:
            return await self._named(opening, hints.named)
        if hints.conversation_hashes:
            ended = answered.known.context.id if answered is not None else None
            continued = await self._continued(opening.run, opening.key_id, hints, ended)
            if continued is not None:
                return continued
        elif hints.lone_prompt is not None:
            grown = await self._grown(opening.run, opening.key_id, hints.lone_prompt, hints.trace)
            if grown is not None:
                return grown
        traced = Name(AttributedBy.TRACEPARENT, hints.trace) if hints.trace is not None else None
        return await (self._named(opening, traced) if traced is not None else self._open(opening, None))

    async def _named(self, opening: Opening, name: Name) -> SessionContext:
        run = opening.run
        known = self._memory.by_name(run.id, name.text)
        is_looked_up = is_session_id(name.text) or self._memory.has_heard_of(run.id, name.text)
        if known is not None and known.may_have_ended:
            known = None  # asked for by its id, it is known for good, but not whether it is open
        if known is None and (is_looked_up or opening.admission is not None):
            known = await self._look_up(run.id, name.text)
        if known is not None and (known.is_open or known.context.id == name.text):
            return _attributed(known, name.by)
        if known is not None and await self._goes_on_in(known, opening.hints, name):
            return _attributed(known, name.by)
        if known is None and is_session_id(name.text) and name.by in (AttributedBy.PATH, AttributedBy.HEADER):
            raise NotFound(f"there is no session {name.text!r} in the run {run.name!r}")
        return await self._open(opening, name)

    async def _goes_on_in(self, known: KnownSession, hints: SessionHints, name: Name) -> bool:
        """Return whether a call by the name of a session that has ended belongs to it all the same."""
        session_id = known.context.id
        if hints.repeats is not None and hints.repeats(session_id):
            return True
        if not stays_with_ended(name):
            return False
        newest = _newest(hints)
        return await self._database.read(
            lambda connection: goes_on_in(SessionRepository(connection), session_id, newest)
        )

    async def _of_turns(self, run: RunView, hints: SessionHints) -> _Answered | None:
        """Return the session, open or ended, of the newest recorded turn that the call sends an id of.

        A key of a run sees the whole run, so any of its turns counts; ids of other runs and invented ones do not.
        """
        known = self._memory.by_turn(run.id, hints.turns[0])
        if known is not None:
            return _Answered(known, hints, hints.turns[0])
        look = self._memory.look()
        turn_ids = list(hints.turns)
        rows = await self._database.read(
            lambda connection: SessionRepository(connection).of_turns(run_id=run.id, turn_ids=turn_ids)
        )
        for turn_id, row in rows.items():
            self._remember(row, look)
            self._memory.put_turn(TurnId(turn_id), row.id)
        newest = next((turn_id for turn_id in hints.turns if turn_id in rows), None)
        return _Answered(self._remember(rows[newest], look), hints, newest) if newest is not None else None

    async def _continued(
        self, run: RunView, key_id: KeyId, hints: SessionHints, ended: SessionId | None
    ) -> SessionContext | None:
        """Return the open session that holds the longest of the call's conversations under this key.

        Return None if only ended ones hold it: what goes on from the end of one attempt does not belong to another
        that merely began alike. The same holds if `ended` does, the session that the call's ids name.
        """
        hashes = hints.conversation_hashes
        traced_id = self._traced(run, hints.trace)
        known, held = self._memory.continued(key_id, hashes[0], traced_id), hashes[0]
        if known is None:
            found = await self._conversation(run, key_id, hashes)
            if found is None:
                return None
            held = found[0]
            known = self._memory.continued(key_id, held, traced_id) or found[1]
        return self._gone_on(known, held, is_barred=ended is not None and self._memory.holds(key_id, held, ended))

    async def _grown(
        self, run: RunView, key_id: KeyId, prompt: LonePrompt, trace: str | None
    ) -> SessionContext | None:
        """Return the open session with the longest prompt that this one has grown from, by `growing`.

        As with conversations, return None if that prompt belongs to ended sessions alone. Only steps that this
        process recorded are known. Whether their sessions are still open is read by their ids, if it is uncertain.
        """
        traced_id = self._traced(run, trace)
        for step in self._growing.continued(key_id, prompt)[:_STEPS]:
            known = self._memory.continued(key_id, step, traced_id)
            if known is None and await self._refreshed(run, key_id, step):
                known = self._memory.continued(key_id, step, traced_id)
            if known is not None:
                return self._gone_on(known, step)
        return None

    async def _refreshed(self, run: RunView, key_id: KeyId, held: bytes) -> bool:
        """Read the state of the sessions that are known to hold a conversation; return whether there are any."""
        look = self._memory.look()
        session_ids = self._memory.holders(key_id, held)
        if not session_ids:
            return False
        rows = await self._database.read(
            lambda connection: SessionRepository(connection).contexts(run_id=run.id, session_ids=session_ids)
        )
        for row in rows:
            self._remember(row, look)
        newest_first = sorted((row.id for row in rows), reverse=True)  # ids sort by the time of creation
        self._memory.put_conversation(key_id, held, dict.fromkeys(newest_first, 0), exact=newest_first)
        return bool(rows)

    def _traced(self, run: RunView, trace: str | None) -> SessionId | None:
        known = self._memory.by_name(run.id, trace) if trace is not None else None
        return known.context.id if known is not None else None

    def _gone_on(self, known: KnownSession, held: bytes, *, is_barred: bool = False) -> SessionContext | None:
        """Return the session as the one of a call that goes on in it, unless it has ended or is barred."""
        context = msgspec.structs.replace(known.context, attributed_by=AttributedBy.CONVERSATION, continues=held)
        if known.is_open and not is_barred:
            return context
        self.call_ended(context, recorded=False)
        return None

    def _forget_answers(self, session_ids: Collection[str]) -> None:
        """Forget what is kept as text of the answers of these sessions."""
        erased = frozenset(session_ids)
        self._growing.drop_where(lambda key_id, step: not erased.isdisjoint(self._memory.holders(key_id, step)))

    async def _conversation(
        self, run: RunView, key_id: KeyId, hashes: Sequence[bytes]
    ) -> tuple[bytes, KnownSession] | None:
        """Read from the store who holds the longest of these conversations; return its hash and the first of them."""
        look = self._memory.look()
        rows = await self._database.read(
            lambda connection: SessionRepository(connection).of_conversation(
                run_id=run.id, key_id=key_id, hashes=hashes
            )
        )
        if not rows:
            return None
        times: dict[SessionId, int] = {}
        for row in rows:
            times[row.id] = times.get(row.id, 0) + row.times
            self._remember(row, look)
        held = rows[0].held
        self._memory.put_conversation(key_id, held, times, exact={row.id for row in rows if row.exact})
        return held, self._remember(rows[0], look)

    async def _open(self, opening: Opening, name: Name | None) -> SessionContext:
        """Open a session on its first call. Of calls that name it at the same time, one opens it."""
        if opening.admission is not None:
            await opening.admission.to_open()
        try:
            return await self._find_or_insert(opening, name)
        except Conflict:  # a proxy beside this one was quicker: now it is found
            return await self._find_or_insert(opening, name)

    async def _find_or_insert(self, opening: Opening, name: Name | None) -> SessionContext:
        by = name.by if name is not None else AttributedBy.NEW
        run, now, look = opening.run, self._clock(), self._memory.look()
        opening = msgspec.structs.replace(opening, hints=_newest(opening.hints))
        found, row = await self._database.commit(
            Opened(opening, name, now),
            order_key=name.text if name is not None else opening.key_id,
        )
        if name is not None and found is not None:
            known = self._remember(found, look)
            self._memory.put_name(run.id, name.text, known.context.id, look)
            if row is None:
                return _attributed(known, by)
        assert row is not None  # opened, where none was found
        context = SessionContext(
            id=row["id"],
            run_id=run.id,
            purpose=Purpose.TRAIN,
            attributed_by=by,
            group_id=row["group_id"],
            key_id=opening.key_id,
            attempt=row["attempt"] if name is not None else None,
        )
        self._memory.put(context, external_id=row["external_id"], is_open=True, look=look)
        if name is not None:
            self._memory.put_name(run.id, name.text, context.id, look)
        if self._observer is not None:
            self._observer.session_opened(attributed_by=by.value, attempt=row["attempt"])
        return msgspec.structs.replace(context, is_new=True)

    async def _look_up(self, run_id: RunId, name: str) -> KnownSession | None:
        look = self._memory.look()
        row = await self._database.read(
            lambda connection: SessionRepository(connection).context(name=name, run_id=run_id)
        )
        if row is None:
            return None
        if row.erased_at is not None:
            raise erased(row.id)
        self._memory.put_name(run_id, name, row.id, look)
        return self._remember(row, look)

    def _remember(self, row: AnyRow | ContextRow, look: Look) -> KnownSession:
        context = SessionContext(
            id=row.id,
            run_id=row.run_id,
            purpose=Purpose(row.purpose),
            attributed_by=AttributedBy.CREATED,
            group_id=row.group_id,
            key_id=row.key_id,
            attempt=row.attempt if row.external_id is not None else None,
        )
        is_open = row.state == SessionState.OPEN.value
        return self._memory.put(context, external_id=row.external_id, is_open=is_open, look=look)


class _Answered(NamedTuple):
    """The session of a turn whose id a call sends back."""

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
    """Return the hints with the newest hashes alone, computed now: transactions run in threads of their own."""
    return msgspec.structs.replace(hints, conversation_hashes=tuple(islice(hints.conversation_hashes, _ANSWERS)))
