"""The repository that records turns: one statement per turn, or a few for many turns at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any, NamedTuple, cast

import msgspec
from sqlalchemy import (
    Connection,
    Double,
    Integer,
    LargeBinary,
    Select,
    Table,
    Text,
    Update,
    bindparam,
    case,
    exists,
    func,
    insert,
    or_,
    select,
    text,
    update,
)
from sqlalchemy.exc import IntegrityError

from proxy.contract.states import SessionState, TrainingState
from proxy.contract.turn import TurnState
from proxy.database.prepared import NewRows, Prepared, given_rows, unindexed
from proxy.database.tables import SessionRow, TurnRow
from proxy.errors import Conflict, Gone, NotFound
from proxy.lifecycle.lifecycle import settle
from proxy.turns.first_messages import first_message_of

_MAY_BECOME_READY = frozenset({TrainingState.PENDING.value, TrainingState.EXCLUDED.value})


class RecordingResult(msgspec.Struct, frozen=True, kw_only=True):
    """The effect of recording a turn. `settled`: it changed the session's training state. `session_open`: the session
    is known to be open."""

    settled: bool
    session_open: bool


class _Added(NamedTuple):
    """The changes that new turns make to their session's row; also the parameters of `_COUNT_TURNS`."""

    id: str
    turns: int
    active_at: float
    oldest: int | None
    newest: int | None
    first_message: bytes | None

    @classmethod
    def by(cls, session_id: str, turns: Sequence[Mapping[str, Any]]) -> _Added:
        # The client got no shadow answer: it neither keeps a session open nor makes its versions newer.
        seen = [columns for columns in turns if columns["state"] != TurnState.SHADOW.value]
        versions = [version for columns in seen for version, _start, _end in columns["spans"]]
        return cls(
            id=session_id,
            turns=len(turns),
            active_at=max(columns["finished_at"] for columns in seen) if seen else turns[0]["started_at"],
            oldest=min(versions, default=None),
            newest=max(versions, default=None),
            first_message=first_message_of(turn["messages"] for turn in turns if turn["parent_id"] is None),
        )


class RecordingRepository:
    """Writes of turns within one transaction."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def record_new(self, turns: Sequence[Mapping[str, Any]], *, now: float) -> list[RecordingResult]:
        """Record several turns, with a few statements on PostgreSQL.

        Raise IntegrityError or NotFound if one of them was recorded before or cannot be recorded. Some turns may have
        been written then, so the caller must roll back.
        """
        if len(turns) <= 1 or self._connection.dialect.name != "postgresql":
            return [self.record(columns, now=now) for columns in turns]
        by_session: dict[str, list[Mapping[str, Any]]] = {}
        for columns in sorted(turns, key=itemgetter("session_id")):  # the lock order: see `lifecycle.lock_sessions`
            by_session.setdefault(columns["session_id"], []).append(columns)
        added = [_Added.by(session_id, of_one) for session_id, of_one in by_session.items()]
        counted = _COUNT_TURNS.run(self._connection, dict(zip(_Added._fields, zip(*added, strict=True), strict=True)))
        if len(counted) != len(added):
            raise NotFound("some of these sessions take no turns")
        rows = []
        for session_id, turn_count, _state, _training in counted:
            of_one = by_session[session_id]
            ordinals = range(turn_count - len(of_one), turn_count)
            rows += [{**columns, "ordinal": ordinal} for columns, ordinal in zip(of_one, ordinals, strict=True)]
        _NEW_TURNS.add(self._connection, rows)
        recorded = {row[0]: self._recorded(*row[:1], *row[2:], now=now) for row in counted}
        return [recorded[columns["session_id"]] for columns in turns]

    def record(self, columns: Mapping[str, Any], *, now: float) -> RecordingResult:
        """Record a turn from its columns without `ordinal`. Do nothing if it was recorded before.

        Raise NotFound for an unknown session, Gone for an erased one, Conflict for an idempotency key in use.
        """
        values = {**_Added.by(columns["session_id"], [columns])._asdict(), "turn": columns["id"]}
        try:
            counted = self._count_and_insert(values, columns)
        except IntegrityError as error:
            raise Conflict(f"turn {columns['id']} cannot be recorded: {error.orig}") from error
        if not counted:
            if self._is_recorded(columns["id"]):
                return RecordingResult(settled=False, session_open=False)
            if self._is_erased(columns["session_id"]):
                raise Gone(f"the session {columns['session_id']} was erased: nothing of this call is kept")
            raise NotFound(f"there is no session {columns['session_id']!r}")
        _, state, training = counted[0]
        return self._recorded(columns["session_id"], state, training, now=now)

    def _recorded(self, session_id: str, state: str, training: str, *, now: float) -> RecordingResult:
        """Settle the session if the turn came after its end, and return the effect."""
        if state != SessionState.ENDED.value:
            return RecordingResult(settled=False, session_open=True)
        if training not in _MAY_BECOME_READY:
            return RecordingResult(settled=False, session_open=False)
        settled = settle(self._connection, [session_id], now=now)
        return RecordingResult(settled=bool(settled.changed), session_open=False)

    def add_users(self, run_id: str, session_id: str, digests: Sequence[bytes]) -> None:
        """Record the users on whose behalf calls of the session are made."""
        for digest in digests:
            values = {"run": run_id, "session": session_id, "digest": digest}
            self._connection.execute(_ADD_USER, values)

    def _count_and_insert(
        self, values: Mapping[str, Any], columns: Mapping[str, Any]
    ) -> Sequence[tuple[int, str, str]]:
        """Return the session's new number of turns, its state and training state; nothing if the turn was recorded
        before, or the session is unknown or erased."""
        if self._connection.dialect.name == "postgresql":
            return _COUNT_AND_INSERT_TURN.run(
                self._connection, {**values, **{f"new_{name}": value for name, value in columns.items()}}
            )
        counted = _COUNT_TURN.run(self._connection, values)
        if counted:
            _INSERT_TURN.run(self._connection, {**columns, "ordinal": counted[0][0] - 1})
        return counted

    def _is_erased(self, session_id: str) -> bool:
        statement = select(exists().where(SessionRow.id == session_id, SessionRow.erased_at.is_not(None)))
        return bool(self._connection.execute(statement).scalar_one())

    def _is_recorded(self, turn_id: str) -> bool:
        statement = select(exists().where(TurnRow.id == turn_id))
        return bool((self._connection.execute(statement)).scalar_one())


# Counting locks the session's row until the commit, so that ordinals have no gaps and settling sees every turn. The
# condition on the turn makes a repeated recording count nothing. Cases and not MAX and MIN, which are null in SQLite
# if one of the values is.
_COUNTED = (
    update(SessionRow)
    .where(
        SessionRow.id == bindparam("id"),
        unindexed(SessionRow.erased_at).is_(None),
        ~exists().where(TurnRow.id == bindparam("turn")),
    )
    .values(
        turn_count=SessionRow.turn_count + bindparam("turns"),
        last_active_at=case(
            (SessionRow.last_active_at < bindparam("active_at"), bindparam("active_at")),
            else_=SessionRow.last_active_at,
        ),
        oldest_version=case(
            (
                or_(SessionRow.oldest_version.is_(None), bindparam("oldest") < SessionRow.oldest_version),
                bindparam("oldest"),
            ),
            else_=SessionRow.oldest_version,
        ),
        newest_version=case(
            (
                or_(SessionRow.newest_version.is_(None), bindparam("newest") > SessionRow.newest_version),
                bindparam("newest"),
            ),
            else_=SessionRow.newest_version,
        ),
        first_message=func.coalesce(SessionRow.first_message, bindparam("first_message", type_=LargeBinary)),
    )
    .returning(SessionRow.turn_count, SessionRow.state, SessionRow.training)
)

_COUNT_TURN = Prepared(_COUNTED)

_INSERT_TURN = Prepared(insert(TurnRow), columns=TurnRow.__table__.columns.keys())


def _count_and_insert_turn() -> Select[Any]:
    """Return one statement for both, as PostgreSQL has it; the turn's columns are parameters `new_…`."""
    # SQLite has no data-modifying common table expressions; there, a second statement costs no round trip.
    counted = _COUNTED.cte("counted")
    given = [column for column in TurnRow.__table__.columns if column.name != "ordinal"]
    inserted = insert(TurnRow).from_select(
        [*(column.name for column in given), "ordinal"],
        select(*(bindparam(f"new_{column.name}", type_=column.type) for column in given), counted.c.turn_count - 1),
    )
    return select(counted.c.turn_count, counted.c.state, counted.c.training).add_cte(inserted.cte("inserted"))


_COUNT_AND_INSERT_TURN = Prepared(_count_and_insert_turn())


def _count_turns() -> Update:
    """Return the statement that counts turns of several sessions on PostgreSQL; its parameters are lists."""
    added = given_rows(
        id=Text(),
        turns=Integer(),
        active_at=Double(),
        oldest=Integer(),
        newest=Integer(),
        first_message=LargeBinary(),
    )
    row = SessionRow.__table__.c
    return (
        update(SessionRow)
        .where(SessionRow.id == added.c.id, unindexed(SessionRow.erased_at).is_(None))
        .values(
            turn_count=row.turn_count + added.c.turns,
            # GREATEST and LEAST ignore nulls in PostgreSQL.
            last_active_at=func.greatest(row.last_active_at, added.c.active_at),
            oldest_version=func.least(row.oldest_version, added.c.oldest),
            newest_version=func.greatest(row.newest_version, added.c.newest),
            first_message=func.coalesce(row.first_message, added.c.first_message),
        )
        .returning(SessionRow.id, SessionRow.turn_count, SessionRow.state, SessionRow.training)
    )


_COUNT_TURNS = Prepared(_count_turns())

# Turns are added by COPY after they were counted: their ordinals come from the locked counts.
_NEW_TURNS = NewRows(cast("Table", TurnRow.__table__))

_ADD_USER = text(
    "INSERT INTO session_users (session_id, digest, run_id) VALUES (:session, :digest, :run) ON CONFLICT DO NOTHING"
)
