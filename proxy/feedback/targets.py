"""What a statement is about: the session or the turn that it names, for the key that sends it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import msgspec
from sqlalchemy import Connection

from proxy.auth.service import Principal
from proxy.contract.identifiers import RunId, SessionId, TurnId
from proxy.errors import Gone, InvalidRequest, NotFound, PermissionDenied
from proxy.feedback.repository import FeedbackRepository, FoundSession


class Target(msgspec.Struct, frozen=True):
    """`training` is the session's training state; `turn_id` None: the whole session."""

    session_id: SessionId
    run_id: RunId
    training: str
    turn_id: TurnId | None


class Finder:
    """Looks targets up for one key. `run`, a name or an id, is whose names are meant where the key has no run. Of
    `known`, sessions by id that this transaction has locked, none is looked up again."""

    def __init__(
        self,
        connection: Connection,
        principal: Principal,
        run: str | None,
        known: Mapping[str, FoundSession] = MappingProxyType({}),
    ) -> None:
        self._known = known
        self._repository = FeedbackRepository(connection)
        self._principal = principal
        self._run_id: str | None = principal.run_id
        if run is not None:
            self._run_id = self._repository.run_id(run)
            if self._run_id is None:
                raise NotFound(f"there is no run {run!r}", param="run")
            if principal.run_id not in (None, self._run_id):
                raise PermissionDenied(f"this key belongs to another run than {run!r}", param="run")

    def of_reward(self, session: str | None, turn: str | None) -> Target:
        """The turn, or the session, or the session of the key. Raises NotFound, PermissionDenied, Gone, and
        InvalidRequest where nothing is named or the turn is of another session."""
        own = self._principal.session_id
        if turn is not None:
            of_turn = self._repository.session_of_turn(turn, run_id=self._run_id)
            if of_turn is None:
                raise NotFound(f"there is no turn {turn!r}", param="turn_id")
            row = self._session(of_turn if session is None else session, "session_id")
            if row.id != of_turn:
                raise InvalidRequest(f"the turn {turn} belongs to another session", param="turn_id")
            return _target(row, turn)
        if session is None and own is None:
            raise InvalidRequest(
                "name a session_id, a turn_id or a completion_id; only a session's own key needs none",
                param="session_id",
            )
        return _target(self._session(session or str(own), "session_id"), None)

    def of_either(self, name: str, param: str) -> Target:
        """A session by its id or name, or else a turn by its id. Raises NotFound, Gone."""
        row = self._repository.session(name, run_id=self._run_id)
        if row is not None:
            return _target(_kept(row, param), None)
        of_turn = self._repository.session_of_turn(name, run_id=self._run_id)
        if of_turn is None:
            raise NotFound(f"there is no session and no turn {name!r}{self._hint()}", param=param)
        return _target(self._session(of_turn, param), name)

    def _session(self, name: str, param: str) -> FoundSession:
        own = self._principal.session_id
        row = self._known.get(name)
        if row is None or self._run_id not in (None, row.run_id):
            row = self._repository.session(name, run_id=self._run_id)
        if own is not None and (row is None or row.id != own):
            raise PermissionDenied(f"this key belongs to the session {own} alone", param=param)
        if row is None:
            raise NotFound(f"there is no session {name!r}{self._hint()}", param=param)
        return _kept(row, param)

    def _hint(self) -> str:
        if self._run_id is not None:
            return ""
        return ': with an admin key, give the "run" whose name for it this is, or its id'


def _kept(row: FoundSession, param: str) -> FoundSession:
    if row.erased_at is not None:
        why = "by retention" if row.erased_reason == "retention" else "on request"
        raise Gone(f"the session {row.id} was erased {why}, and takes no feedback any more", param=param)
    return row


def _target(row: FoundSession, turn: str | None) -> Target:
    turn_id = None if turn is None else TurnId(turn)
    return Target(SessionId(row.id), RunId(row.run_id), row.training, turn_id)
