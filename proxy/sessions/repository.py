"""Rows of sessions and groups: finding the session of a call, and opening one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, cast

from sqlalchemy import (
    ColumnElement,
    Connection,
    Select,
    Table,
    Text,
    and_,
    bindparam,
    case,
    delete,
    func,
    insert,
    literal,
    literal_column,
    or_,
    select,
    update,
)
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import InstrumentedAttribute, aliased

from proxy.contract.identifiers import GroupId, KeyId, RunId, SessionId, new_group_id
from proxy.contract.turn import Continuation, TurnState
from proxy.database.prepared import NewRows, Prepared, among, given_rows, unindexed
from proxy.database.rows import AnyRow
from proxy.database.tables import (
    GroupRow,
    RewardRow,
    SessionRow,
    SessionUserRow,
    TurnRow,
)
from proxy.errors import Conflict
from proxy.lifecycle.lifecycle import is_open
from proxy.lifecycle.session_names import session_called

# Hashes compared in one query: bounds its parameters.
_HASHES = 64


class ContextRow(NamedTuple):
    """The columns of a session that a call needs."""

    id: SessionId
    run_id: RunId
    purpose: str
    group_id: GroupId | None
    key_id: KeyId | None
    external_id: str | None
    attempt: int
    state: str
    erased_at: float | None


class SessionRepository:
    """Reads and writes on the connection of one transaction."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def context(self, *, name: str, run_id: str | None) -> ContextRow | None:
        """Return the session with our id, or the newest of the run with the client's own name."""
        row = session_called(self._connection, name, run_id, _BY_ID)
        return ContextRow(*row) if row is not None else None

    def newest_called(self, names: Sequence[tuple[RunId, str]]) -> dict[tuple[RunId, str], ContextRow]:
        """Return the newest session for each pair of a run and a client's own name; pairs without one are omitted.
        Only for PostgreSQL."""
        runs, called = zip(*names, strict=True)
        rows = _NEWEST_CALLED.run(self._connection, {"run": list(runs), "name": list(called)})
        return {(run_id, name): ContextRow(*columns) for run_id, name, *columns in rows}

    def goes_on_in(
        self, session_id: str, *, turn_ids: Sequence[str], hashes: Sequence[bytes], idempotency_key: str | None
    ) -> bool:
        """Return whether a call continues a recorded turn of the session, or repeats one of its calls.

        A call continues a turn if it sends the turn's id, or if the turn ended with one of these conversations.
        """
        of_session = and_(TurnRow.session_id == session_id, TurnRow.state != TurnState.FAILED.value)
        ways: list[ColumnElement[bool]] = [
            TurnRow.id.in_(turn_ids),
            TurnRow.conversation_hash.in_(hashes),
            TurnRow.settled_hash.in_(hashes),
        ]
        if idempotency_key is not None:
            ways.append(TurnRow.idempotency_key == idempotency_key)
        found = self._connection.execute(select(TurnRow.id).where(of_session, or_(*ways)).limit(1))
        return found.first() is not None

    def contexts(self, *, run_id: str, session_ids: Sequence[str]) -> list[ContextRow]:
        """Return the sessions among these that belong to the run and are not erased."""
        rows = _BY_IDS.run(self._connection, {"run": run_id, "ids": list(session_ids)})
        return [ContextRow(*row) for row in rows]

    def of_turns(self, *, run_id: str, turn_ids: Sequence[str]) -> dict[str, ContextRow]:
        """Return the sessions of these turns by turn. Turns of other runs, failed and unknown ones are omitted."""
        rows = _OF_TURNS.run(self._connection, {"run": run_id, "ids": list(turn_ids)})
        return {turn_id: ContextRow(*columns) for turn_id, *columns in rows}

    def of_conversation(self, *, run_id: str, key_id: str, hashes: Sequence[bytes]) -> list[AnyRow]:
        """Return the key's sessions that hold the longest conversation of `hashes` (longest first) that any of them
        holds: open sessions first, then the newest first.

        Each row has the hash (`held`), the number of calls that continued it (`times`), and whether the session holds
        the whole conversation (`exact`) or all but its last message.
        """
        # The first hash has a query of its own: it is nearly always found, and then the others are never computed.
        for part in _parts(hashes):
            values = {"run": run_id, "key": key_id, "hashes": list(part)}
            rows = [row for held in (_HELD, _SETTLED) for row in self._connection.execute(held, values)]
            held = {row.held for row in rows}
            longest = next((value for value in part if value in held), None)
            if longest is not None:
                return [row for row in rows if row.held == longest]
        return []

    def add_users(self, run_id: str, session_ids: Sequence[str], digests: Sequence[bytes]) -> None:
        """Record the people on whose behalf the sessions of this transaction are opened."""
        users = [
            {"session_id": session_id, "digest": digest, "run_id": run_id}
            for session_id in session_ids
            for digest in digests
        ]
        if users:
            self._connection.execute(insert(SessionUserRow), users)

    def delete_empty(self, session_id: str) -> bool:
        """Delete an open session without turns and rewards. Raise Conflict if another row refers to it."""
        rewards = select(RewardRow.id).where(RewardRow.session_id == session_id).exists()
        statement = delete(SessionRow).where(
            SessionRow.id == session_id,
            is_open(),
            SessionRow.turn_count == 0,
            SessionRow.erased_at.is_(None),
            ~rewards,
        )
        try:
            return bool(self._connection.execute(statement).rowcount)
        except IntegrityError as error:
            raise Conflict(f"the session {session_id} is not empty: {error.orig}") from error

    def insert(self, rows: Sequence[dict[str, Any]]) -> None:
        """Insert new sessions. Raise Conflict if an open session has the name of one."""
        try:
            _NEW_SESSIONS.add(self._connection, rows)
        except IntegrityError as error:
            raise Conflict(f"the session cannot be opened: {error.orig}") from error

    def group(self, *, run_id: str, name: str) -> AnyRow | None:
        statement = select(GroupRow.id, GroupRow.size).where(GroupRow.run_id == run_id, GroupRow.name == name)
        return self._connection.execute(statement).one_or_none()

    def insert_group(self, *, run_id: str, name: str | None, size: int | None, now: float) -> GroupId:
        """Insert a group and return its id, which is also its name if it has no other."""
        group_id = new_group_id()
        values = {"id": group_id, "run_id": run_id, "name": name or group_id, "size": size, "created_at": now}
        self._connection.execute(insert(GroupRow).values(values))
        return group_id

    def set_group_size(self, group_id: str, size: int) -> None:
        self._connection.execute(update(GroupRow).where(GroupRow.id == group_id).values(size=size))


# The columns that a new session has values for.
_NEW = (
    "id",
    "run_id",
    "external_id",
    "attempt",
    "group_id",
    "key_id",
    "task",
    "purpose",
    "metadata",
    "attributed_by",
    "state",
    "training",
    "turn_count",
    "idle_seconds",
    "created_at",
    "last_active_at",
)

_NEW_SESSIONS = NewRows(
    cast("Table", SessionRow.__table__),
    filled=[column.name for column in SessionRow.__table__.columns if column.name not in _NEW],
)

_CONTEXT = tuple(getattr(SessionRow, column) for column in ContextRow._fields)

_BY_ID = Prepared(select(*_CONTEXT).where(SessionRow.id == bindparam("of")))

_BY_IDS = Prepared(
    select(*_CONTEXT).where(
        among(SessionRow.id, "ids"),
        unindexed(SessionRow.run_id) == bindparam("run"),
        unindexed(SessionRow.erased_at).is_(None),
    )
)


def _newest_called() -> Select[Any]:
    """Return a statement with one index look-up for each name, however many sessions have had it."""
    given = given_rows(run=Text(), name=Text())
    newest = (
        select(*_CONTEXT)
        .where(SessionRow.run_id == given.c.run, SessionRow.external_id == given.c.name)
        .order_by(SessionRow.attempt.desc(), SessionRow.created_at.desc(), SessionRow.id.desc())
        .limit(1)
        .lateral()
    )
    return select(given.c.run, given.c.name, *newest.c).join_from(given, newest, literal_column("true"))


_NEWEST_CALLED = Prepared(_newest_called())

_FOLLOWING = aliased(TurnRow)

_TIMES = (
    select(func.count())
    .where(
        _FOLLOWING.session_id == TurnRow.session_id,
        _FOLLOWING.parent_id == TurnRow.id,
        _FOLLOWING.continuation.in_((Continuation.EXACT.value, Continuation.RETEMPLATED.value)),
        _FOLLOWING.state == TurnState.COMPLETE.value,
    )
    .scalar_subquery()
)


def _parts(hashes: Sequence[bytes]) -> Iterator[Sequence[bytes]]:
    if hashes:
        yield (hashes[0],)
    for start in range(1, len(hashes), _HASHES):
        yield hashes[start : start + _HASHES]


def _holding(
    column: InstrumentedAttribute[bytes] | InstrumentedAttribute[bytes | None], *, exact: bool
) -> Select[Any]:
    return (
        select(column.label("held"), *_CONTEXT, _TIMES.label("times"), literal(exact).label("exact"))
        .join(SessionRow, SessionRow.id == TurnRow.session_id)
        .where(
            TurnRow.run_id == bindparam("run"),
            column.in_(bindparam("hashes", expanding=True)),
            TurnRow.state != TurnState.FAILED.value,
            SessionRow.erased_at.is_(None),
            SessionRow.key_id == bindparam("key"),
        )
        .order_by(case((is_open(), 0), else_=1), TurnRow.finished_at.desc(), TurnRow.id.desc())
    )


_OF_TURNS = Prepared(
    select(TurnRow.id, *_CONTEXT)
    .join(SessionRow, SessionRow.id == TurnRow.session_id)
    .where(
        among(TurnRow.id, "ids"),
        TurnRow.run_id == bindparam("run"),
        TurnRow.state != TurnState.FAILED.value,
        TurnRow.state != TurnState.SHADOW.value,
        unindexed(SessionRow.erased_at).is_(None),
    )
)

_HELD = _holding(TurnRow.conversation_hash, exact=True)
_SETTLED = _holding(TurnRow.settled_hash, exact=False)
