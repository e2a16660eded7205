"""The transaction that opens a session, and the rules for the attempts of a name.

A session is one attempt, and its name may be used again for the next attempt. A call by the name of an ended session
opens the next one. The exception is a call that continues a conversation of the ended session, for example to
summarise it: it belongs to the ended session, unless clients use the name beyond one attempt (`outlives_sessions`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import msgspec
from sqlalchemy import Connection

from proxy.contract.identifiers import GroupId, KeyId, RunId, SessionId, is_session_id, new_session_id
from proxy.contract.states import SessionState, TrainingState
from proxy.contract.trajectory import Purpose
from proxy.database.group_commit import Together
from proxy.errors import Gone, InvalidRequest, NameUsed
from proxy.limits.service import Admission
from proxy.runs.service import RunView
from proxy.sessions.identification import AttributedBy, Name, SessionHints
from proxy.sessions.repository import ContextRow, SessionRepository


class SessionSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The properties of a session to open. `ttl` is its idle time-out in seconds; None for the run's."""

    task: str | None = None
    group: str | None = None
    group_size: int | None = None
    purpose: Purpose = Purpose.TRAIN
    metadata: dict[str, Any] | None = None
    ttl: float | None = None


class Opening(msgspec.Struct, frozen=True, kw_only=True):
    """The properties of a call that may open a session, except its name. `hints` show whether it continues an ended
    session."""

    run: RunView
    key_id: KeyId
    hints: SessionHints
    admission: Admission | None


FoundOrNew = tuple[ContextRow | None, dict[str, Any] | None]
"""The session that already has the name, and the row of a newly opened one; the row is None if the call belongs to
the former."""


class Opened(Together[FoundOrNew]):
    """The work of a transaction that finds the session of a call by name, or opens one.

    Raise Gone for an erased session, NameUsed if the run refuses to use names again, Conflict if another process
    opened a session of the name at the same time.
    """

    def __init__(self, opening: Opening, name: Name | None, now: float) -> None:
        self._opening = opening
        self._name = name
        self._now = now

    def __call__(self, connection: Connection) -> FoundOrNew:
        repository = SessionRepository(connection)
        name, run_id = self._name, self._opening.run.id
        found = repository.context(name=name.text, run_id=run_id) if name is not None else None
        row = self._new(repository, found)
        if row is not None:
            repository.insert([row])
        return found, row

    @classmethod
    def together(cls, connection: Connection, writes: Sequence[Self]) -> list[FoundOrNew]:
        """Run several such transactions as one. On PostgreSQL, sessions with different names are inserted together,
        which saves round trips; SQLite has none."""
        repository = SessionRepository(connection)
        alike: dict[tuple[RunId, str], Self] = {}
        if connection.dialect.name == "postgresql":
            alike = {write._called: write for write in writes if write._called is not None}
        found = repository.newest_called(list(alike)) if alike else {}
        results: dict[int, FoundOrNew] = {}
        rows: list[dict[str, Any]] = []
        for called, write in alike.items():
            row = write._new(repository, found.get(called))
            rows += [row] if row is not None else []
            results[id(write)] = found.get(called), row
        repository.insert(rows)
        return [results[id(write)] if id(write) in results else write(connection) for write in writes]

    @property
    def _called(self) -> tuple[RunId, str] | None:
        """The run and the client's own name for the session; None for a call by our id or without a name."""
        if self._name is None or is_session_id(self._name.text):
            return None
        return self._opening.run.id, self._name.text

    def _new(self, repository: SessionRepository, found: ContextRow | None) -> dict[str, Any] | None:
        """Return the row to insert, or None if the call belongs to the found session."""
        name, opening = self._name, self._opening
        if name is not None and found is not None:
            if found.erased_at is not None:
                raise erased(found.id)
            if found.state == SessionState.OPEN.value or found.id == name.text:
                return None
            if stays_with_ended(name) and goes_on_in(repository, found.id, opening.hints):
                return None
            if stays_with_ended(name) and opening.run.settings.repeated_names == "refuse":
                raise _used(name, found)
        group_id, group = None, opening.hints.group
        if group is not None:
            group_id = group_for(repository, opening.run, SessionSpec(group=group), None, self._now)
        return new_row(
            run_id=opening.run.id,
            group_id=group_id,
            attributed_by=name.by if name is not None else AttributedBy.NEW,
            now=self._now,
            external_id=name.text if name is not None else None,
            attempt=1 if found is None else found.attempt + 1,
            key_id=opening.key_id,
        )


def group_for(
    repository: SessionRepository, run: RunView, spec: SessionSpec, n: int | None, now: float
) -> GroupId | None:
    """Return the group of a new session, created if needed; None for a session without a group.

    `n` sessions that are opened together without a group's name form a group of their own. Raise InvalidRequest if
    the group is known with another size.
    """
    size = spec.group_size or n
    if spec.group is None:
        if n is None or size is None or size < 2:
            return None
        return repository.insert_group(run_id=run.id, name=None, size=size, now=now)
    known = repository.group(run_id=run.id, name=spec.group)
    if known is None:
        return repository.insert_group(run_id=run.id, name=spec.group, size=size, now=now)
    if known.size is None and size is not None:
        repository.set_group_size(known.id, size)
    elif spec.group_size is not None and spec.group_size != known.size:
        raise InvalidRequest(
            f"the group {spec.group!r} is already known with the size {known.size}", param="group_size"
        )
    return GroupId(known.id)


def stays_with_ended(name: Name) -> bool:
    """Return whether calls that continue an ended session belong to it: true for a name of a single attempt."""
    return not name.by.outlives_sessions


def goes_on_in(repository: SessionRepository, session_id: SessionId, hints: SessionHints) -> bool:
    """Return whether a call continues a turn of the session, or repeats one."""
    if not hints.conversation_hashes and not hints.turns and hints.idempotency_key is None:
        return False
    return repository.goes_on_in(
        session_id,
        turn_ids=hints.turns,
        hashes=hints.conversation_hashes,
        idempotency_key=hints.idempotency_key,
    )


def _used(name: Name, found: ContextRow) -> NameUsed:
    return NameUsed(
        f"the session {name.text!r} has ended (attempt {found.attempt}, {found.id}) and this run refuses to use a "
        'name again: name every attempt anew, or set run.repeated_names to "next_attempt"'
    )


def erased(session_id: str) -> Gone:
    """Return the error for a call in an erased session."""
    return Gone(f"the session {session_id} was erased; open another one")


def new_row(
    *,
    run_id: RunId,
    group_id: GroupId | None,
    attributed_by: AttributedBy,
    now: float,
    external_id: str | None = None,
    attempt: int = 1,
    key_id: str | None = None,
    task: str | None = None,
    purpose: Purpose = Purpose.TRAIN,
    metadata: dict[str, Any] | None = None,
    idle_seconds: float | None = None,
) -> dict[str, Any]:
    """Return the row of a new session, with every column that an insert of many rows needs."""
    return {
        "id": new_session_id(),
        "run_id": run_id,
        "external_id": external_id,
        "attempt": attempt,
        "group_id": group_id,
        "key_id": key_id,
        "task": task,
        "purpose": purpose.value,
        "metadata": metadata,
        "attributed_by": attributed_by.value,
        "state": SessionState.OPEN.value,
        "training": (TrainingState.EXCLUDED if purpose is Purpose.EVAL else TrainingState.PENDING).value,
        "turn_count": 0,
        "idle_seconds": idle_seconds,
        "created_at": now,
        "last_active_at": now,
    }
