"""Finds the session or turn that feedback is about, with the rights of the key that sends it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import msgspec
from sqlalchemy import Connection

from proxy.auth.access import Principal, covers, unknown_run
from proxy.contract.identifiers import RunId, SessionId, TurnId
from proxy.errors import Gone, InvalidRequest, NotFound, PermissionDenied
from proxy.feedback.repository import FeedbackRepository, FoundSession


class Target(msgspec.Struct, frozen=True):
    """The subject of feedback: a session with its training state, or one turn of it."""

    session_id: SessionId
    run_id: RunId
    training: str
    turn_id: TurnId | None


class Finder:
    """Finds targets for one key, within one transaction.

    `run`, a name or an id, is the run whose session names are meant, if the key belongs to no run. `known` are
    sessions, by id, that the transaction has already read and locked.
    """

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
            found = self._repository.run(run)
            if found is None or not covers(principal, found):
                raise unknown_run(run, param="run")
            self._run_id = found.id

    def of_reward(self, session: str | None, turn: str | None) -> Target:
        """Return the turn, else the session, else the key's own session.

        Raise NotFound, PermissionDenied, Gone, or InvalidRequest if nothing is named or the turn is of another
        session.
        """
        own = self._principal.session_id
        if turn is not None:
            of_turn = self._repository.session_of_turn(turn, run_id=self._run_id)
            if of_turn is None or not self._covers_session(of_turn):
                raise NotFound(f"there is no turn {turn!r}", param="turn_id")
            row = self._session(of_turn if session is None else session, "session_id")
            if row.id != of_turn:
                raise InvalidRequest(f"the turn {turn} belongs to another session", param="turn_id")
            return _target(row, turn)
        if session is None and own is None:
            raise InvalidRequest(
                "give a session_id, a turn_id or a completion_id; only a session key needs none",
                param="session_id",
            )
        return _target(self._session(session or str(own), "session_id"), None)

    def of_either(self, name: str, param: str) -> Target:
        """Return a session by its id or name, else a turn by its id. Raise NotFound or Gone."""
        row = self._repository.session(name, run_id=self._run_id)
        if row is not None and self._covers_run(row.run_id):
            return _target(_not_erased(row, param), None)
        of_turn = self._repository.session_of_turn(name, run_id=self._run_id)
        if of_turn is None or not self._covers_session(of_turn):
            raise NotFound(f"there is no session or turn {name!r}{self._hint()}", param=param)
        return _target(self._session(of_turn, param), name)

    def _session(self, name: str, param: str) -> FoundSession:
        own = self._principal.session_id
        row = self._known.get(name)
        if row is None or self._run_id not in (None, row.run_id):
            row = self._repository.session(name, run_id=self._run_id)
        if own is not None and (row is None or row.id != own):
            raise PermissionDenied(f"this session key works only for its own session {own}", param=param)
        if row is None or not self._covers_run(row.run_id):
            raise NotFound(f"there is no session {name!r}{self._hint()}", param=param)
        return _not_erased(row, param)

    def _covers_session(self, session_id: str) -> bool:
        """Return whether a turn of this session may be known to the key."""
        if self._principal.project_id is None:
            return True  # the query for the turn was confined to the key's run already
        row = self._repository.session(session_id, run_id=self._run_id)
        return row is not None and self._covers_run(row.run_id)

    def _covers_run(self, run_id: str) -> bool:
        """Return whether a session of this run may be known to the key."""
        # Only the keys of projects need the query: others are for one run, by which sessions are found, or for all.
        if self._principal.project_id is None:
            return True
        found = self._repository.run_by_id(run_id)
        return found is not None and covers(self._principal, found)

    def _hint(self) -> str:
        if self._run_id is not None:
            return ""
        return ': give the "run" that the session name belongs to, or the session id'


def _not_erased(row: FoundSession, param: str) -> FoundSession:
    """Return the session; raise Gone if it was erased."""
    if row.erased_at is not None:
        why = "by retention" if row.erased_reason == "retention" else "on request"
        raise Gone(f"the session {row.id} was erased {why} and accepts no feedback", param=param)
    return row


def _target(row: FoundSession, turn: str | None) -> Target:
    turn_id = None if turn is None else TurnId(turn)
    return Target(SessionId(row.id), RunId(row.run_id), row.training, turn_id)
