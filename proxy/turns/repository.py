"""Rows of turns, as they are written and found again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from operator import itemgetter
from typing import Any, NamedTuple
from typing import cast as cast_to

import msgspec
from sqlalchemy import (
    Connection,
    Double,
    Integer,
    Row,
    Select,
    Table,
    Text,
    Update,
    and_,
    bindparam,
    case,
    cast,
    exists,
    func,
    insert,
    or_,
    select,
    text,
    true,
    update,
)
from sqlalchemy.exc import IntegrityError

from proxy.contract.arrays import widened_ids
from proxy.contract.identifiers import TurnId
from proxy.contract.states import SessionState, TrainingState
from proxy.contract.token_ids import TokenIds
from proxy.contract.turn import Continuation, FinishReason, SamplingParameters, TurnState, VersionSpan
from proxy.database.prepared import NewRows, Prepared, among, given_rows, unindexed
from proxy.database.tables import SessionRow, TurnRow
from proxy.errors import Conflict, Gone, NotFound
from proxy.lifecycle.lifecycle import is_open, settle
from proxy.turns.assembly import PathPiece, StoredTurn

_HASHES = 500
_SESSIONS = 64
"""Whose turns one statement reads."""

_MAY_BECOME_READY = frozenset({TrainingState.PENDING.value, TrainingState.EXCLUDED.value})


class RecordedTurn(msgspec.Struct, frozen=True, kw_only=True):
    """`settled`: the session's training state changed by the turn. `session_open`: it is known to be open still."""

    settled: bool
    session_open: bool


class _Added(NamedTuple):
    """What new turns change of their session's row; as columns of `_COUNT_TURNS`, lists of these."""

    id: str
    turns: int
    active_at: float
    oldest: int | None
    newest: int | None

    @classmethod
    def by(cls, session_id: str, turns: Sequence[Mapping[str, Any]]) -> _Added:
        versions = [version for columns in turns for version, _start, _end in columns["spans"]]
        return cls(
            id=session_id,
            turns=len(turns),
            active_at=max(columns["finished_at"] for columns in turns),
            oldest=min(versions, default=None),
            newest=max(versions, default=None),
        )


class TurnRepository:
    """Reads and writes of one transaction."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def record_new(self, turns: Sequence[Mapping[str, Any]], *, now: float) -> list[RecordedTurn]:
        """`record` of several, at once where the database can. Raises IntegrityError or NotFound where one of them
        was recorded before or cannot be; then some may have been written."""
        if len(turns) <= 1 or self._connection.dialect.name != "postgresql":
            return [self.record(columns, now=now) for columns in turns]
        by_session: dict[str, list[Mapping[str, Any]]] = {}
        for columns in sorted(turns, key=itemgetter("session_id")):  # in one order: see `lifecycle.lock_sessions`
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

    def record(self, columns: Mapping[str, Any], *, now: float) -> RecordedTurn:
        """Inserts a turn (`columns` without `ordinal`) once.

        Raises NotFound for an unknown session, Gone for an erased one, Conflict for an idempotency key that is taken.
        """
        values = {**_Added.by(columns["session_id"], [columns])._asdict(), "turn": columns["id"]}
        try:
            counted = self._count_and_insert(values, columns)
        except IntegrityError as error:
            raise Conflict(f"turn {columns['id']} cannot be recorded: {error.orig}") from error
        if not counted:
            if self._is_recorded(columns["id"]):
                return RecordedTurn(settled=False, session_open=False)
            if self._is_erased(columns["session_id"]):
                raise Gone(f"the session {columns['session_id']} was erased: nothing of this call is kept")
            raise NotFound(f"there is no session {columns['session_id']!r}")
        _, state, training = counted[0]
        return self._recorded(columns["session_id"], state, training, now=now)

    def _recorded(self, session_id: str, state: str, training: str, *, now: float) -> RecordedTurn:
        """Of a turn of a session in these states."""
        if state != SessionState.ENDED.value:
            return RecordedTurn(settled=False, session_open=True)
        if training not in _MAY_BECOME_READY:
            return RecordedTurn(settled=False, session_open=False)
        settled = settle(self._connection, [session_id], now=now)
        return RecordedTurn(settled=bool(settled.changed), session_open=False)

    def add_users(self, run_id: str, session_id: str, digests: Sequence[bytes]) -> None:
        """Those on whose behalf calls of the session are made; who is known already stays."""
        for digest in digests:
            values = {"run": run_id, "session": session_id, "digest": digest}
            self._connection.execute(_ADD_USER, values)

    def by_conversation(
        self, session_id: str, hashes: Sequence[bytes], *, tools_hash: bytes | None = None, named: Sequence[str] = ()
    ) -> str | None:
        """Return the session's turn with the first of `hashes` among its turns of that tools hash; without any, among
        all its turns. Of several with one hash, a `named` one is taken, else the newest."""
        longest: str | None = None
        for start in range(0, len(hashes), _HASHES):
            part = list(hashes[start : start + _HASHES])
            order = {value: position for position, value in enumerate(part)}
            rows = self._connection.execute(_BY_CONVERSATION, {"session": session_id, "hashes": part}).all()
            rows = sorted(rows, key=lambda row: (-order[row.conversation_hash], row.id in named))
            fitting = [row.id for row in rows if tools_hash in (None, row.tools_hash)]
            if fitting:
                return str(fitting[-1])
            if longest is None and rows:
                longest = str(rows[-1].id)
        return longest

    def latest(self, session_id: str, limit: int) -> list[str]:
        """Newest first, without failed turns."""
        statement = (
            select(TurnRow.id)
            .where(TurnRow.session_id == session_id, TurnRow.state != TurnState.FAILED.value)
            .order_by(TurnRow.ordinal.desc())
            .limit(limit)
        )
        return list((self._connection.execute(statement)).scalars())

    def pieces(self, turn_ids: Sequence[str]) -> dict[str, PathPiece]:
        """The turns and all their ancestors."""
        rows = self._connection.execute(_PIECES, {"ids": list(turn_ids)})
        return {
            row.id: PathPiece(
                id=row.id,
                parent_id=row.parent_id,
                prefix_tokens=row.prefix_tokens,
                prompt_ids=TokenIds(widened_ids(row.prompt_ids)),
                output_ids=TokenIds(widened_ids(row.output_ids)),
                redacted=row.redacted,
            )
            for row in rows
        }

    def heads(self, turn_ids: Sequence[str]) -> list[Row[*tuple[Any, ...]]]:
        """What a later call must know of these turns besides their paths."""
        return list((self._connection.execute(_HEADS, {"ids": list(turn_ids)})).all())

    def response(self, session_id: str, idempotency_key: str) -> dict[str, Any] | None:
        statement = select(TurnRow.response).where(
            TurnRow.session_id == session_id, TurnRow.idempotency_key == idempotency_key
        )
        return (self._connection.execute(statement)).scalar_one_or_none()

    def responses(self, turn_ids: Sequence[str]) -> list[dict[str, Any]]:
        statement = select(TurnRow.id, TurnRow.response).where(TurnRow.id.in_(turn_ids))
        found = {row.id: row.response for row in self._connection.execute(statement)}
        return [found[turn_id] for turn_id in turn_ids if turn_id in found]

    def endings(self, run_id: str, tools_hash: bytes, limit: int) -> list[bytes]:
        """The conversations of turns of this tools hash, in the run's open sessions; of the latest sessions first."""
        statement = (
            select(TurnRow.conversation_hash)
            .join(SessionRow, SessionRow.id == TurnRow.session_id)
            .where(
                SessionRow.run_id == run_id,
                is_open(),
                TurnRow.tools_hash == tools_hash,
                TurnRow.state != TurnState.FAILED.value,
            )
            .order_by(SessionRow.last_active_at.desc())
            .limit(limit)
        )
        return list(self._connection.execute(statement).scalars())

    def turns_of(self, turn_counts: Mapping[str, int]) -> dict[str, list[StoredTurn]]:
        """Return the turns that can be trained, by session and in order: those that began before its end, of the
        first `turn_counts[session]` recorded."""
        turns: dict[str, list[StoredTurn]] = {session_id: [] for session_id in turn_counts}
        session_ids = list(turn_counts)
        for start in range(0, len(session_ids), _SESSIONS):
            part = session_ids[start : start + _SESSIONS]
            for session_id, ordinal, *columns in self._trainable_turns(part):
                if ordinal < turn_counts[session_id]:
                    turns[session_id].append(_stored_turn(*columns))
        return turns

    def _trainable_turns(self, session_ids: Sequence[str]) -> Sequence[tuple[Any, ...]]:
        """Return the columns of `_TRAINABLE`, by session and in order."""
        if self._connection.dialect.name == "postgresql":
            return _TRAINABLE_TURNS_OF_GIVEN.run(self._connection, {"session": session_ids})
        return _TRAINABLE_TURNS.run(self._connection, {"ids": session_ids})

    def _count_and_insert(
        self, values: Mapping[str, Any], columns: Mapping[str, Any]
    ) -> Sequence[tuple[int, str, str]]:
        """The session's new count of turns, its state and its training state; nothing where it takes no such turn."""
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
    )
    .returning(SessionRow.turn_count, SessionRow.state, SessionRow.training)
)

_COUNT_TURN = Prepared(_COUNTED)

_INSERT_TURN = Prepared(insert(TurnRow), columns=TurnRow.__table__.columns.keys())


def _count_and_insert_turn() -> Select[Any]:
    """Both as one statement, which SQLite does not know; the turn's columns are parameters `new_…`."""
    counted = _COUNTED.cte("counted")
    given = [column for column in TurnRow.__table__.columns if column.name != "ordinal"]
    inserted = insert(TurnRow).from_select(
        [*(column.name for column in given), "ordinal"],
        select(*(bindparam(f"new_{column.name}", type_=column.type) for column in given), counted.c.turn_count - 1),
    )
    return select(counted.c.turn_count, counted.c.state, counted.c.training).add_cte(inserted.cte("inserted"))


_COUNT_AND_INSERT_TURN = Prepared(_count_and_insert_turn())


def _count_turns() -> Update:
    """Of several sessions, as PostgreSQL knows it; the parameters are lists. Returns the session's id first."""
    added = given_rows(id=Text(), turns=Integer(), active_at=Double(), oldest=Integer(), newest=Integer())
    row = SessionRow.__table__.c
    return (
        update(SessionRow)
        .where(SessionRow.id == added.c.id, unindexed(SessionRow.erased_at).is_(None))
        .values(
            turn_count=row.turn_count + added.c.turns,
            last_active_at=func.greatest(row.last_active_at, added.c.active_at),
            oldest_version=func.least(row.oldest_version, added.c.oldest),
            newest_version=func.greatest(row.newest_version, added.c.newest),
        )
        .returning(SessionRow.id, SessionRow.turn_count, SessionRow.state, SessionRow.training)
    )


_COUNT_TURNS = Prepared(_count_turns())

_NEW_TURNS = NewRows(cast_to("Table", TurnRow.__table__))

_ADD_USER = text(
    "INSERT INTO session_users (session_id, digest, run_id) VALUES (:session, :digest, :run) ON CONFLICT DO NOTHING"
)

_BY_CONVERSATION = (
    select(TurnRow.id, TurnRow.conversation_hash, TurnRow.tools_hash)
    .where(
        TurnRow.session_id == bindparam("session"),
        TurnRow.conversation_hash.in_(bindparam("hashes", expanding=True)),
        TurnRow.state != TurnState.FAILED.value,
    )
    .order_by(TurnRow.ordinal)
)

_ANCESTRY = (
    select(TurnRow.id, TurnRow.parent_id)
    .where(TurnRow.id.in_(bindparam("ids", expanding=True)))
    .cte("ancestry", recursive=True)
)
_ANCESTRY = _ANCESTRY.union(
    select(TurnRow.id, TurnRow.parent_id).join(_ANCESTRY, TurnRow.id == _ANCESTRY.c.parent_id)
)

_PIECES = select(
    TurnRow.id,
    TurnRow.parent_id,
    TurnRow.prefix_tokens,
    TurnRow.prompt_ids,
    TurnRow.output_ids,
    TurnRow.masked.is_not(None).label("redacted"),
).join(_ANCESTRY, TurnRow.id == _ANCESTRY.c.id)

_HEADS = select(
    TurnRow.id,
    TurnRow.session_id,
    TurnRow.conversation_hash,
    TurnRow.tools_hash,
    TurnRow.finish_reason,
    TurnRow.state,
).where(TurnRow.id.in_(bindparam("ids", expanding=True)))

_TRAINABLE = (
    TurnRow.session_id,
    TurnRow.ordinal,
    TurnRow.id,
    TurnRow.parent_id,
    TurnRow.prefix_tokens,
    TurnRow.prompt_ids,
    TurnRow.output_ids,
    TurnRow.output_logprobs,
    cast(TurnRow.spans, Text).label("spans"),
    cast(TurnRow.sampling, Text).label("sampling"),
    TurnRow.state,
    TurnRow.finish_reason,
    TurnRow.continuation,
    TurnRow.started_at,
    TurnRow.finished_at,
    cast(TurnRow.masked, Text).label("masked"),
)

_TRAINABLE_TURNS = Prepared(
    select(*_TRAINABLE)
    .join(SessionRow, and_(SessionRow.id == TurnRow.session_id, TurnRow.started_at <= SessionRow.ended_at))
    .where(among(TurnRow.session_id, "ids"))
    .order_by(TurnRow.session_id, TurnRow.ordinal)
)


def _trainable_turns_of_given() -> Select[Any]:
    """As PostgreSQL knows it: a look by each session's name, where it would else compare with going through all
    turns and all sessions, and often choose that."""
    given = given_rows(session=Text())
    ended = select(SessionRow.ended_at).where(SessionRow.id == given.c.session).limit(1).lateral("ended")
    turns = (
        select(*_TRAINABLE)
        .where(TurnRow.session_id == given.c.session, TurnRow.started_at <= ended.c.ended_at)
        .order_by(TurnRow.ordinal)
        .lateral("turns_of_given")
    )
    return select(turns).select_from(given).join(ended, true()).join(turns, true()).order_by(turns.c.ordinal)


_TRAINABLE_TURNS_OF_GIVEN = Prepared(_trainable_turns_of_given())


_SPANS = msgspec.json.Decoder(list[tuple[int, int, int]])
_MASKED = msgspec.json.Decoder(tuple[tuple[int, int], ...])
_STATES = {state.value: state for state in TurnState}
_FINISH_REASONS = {reason.value: reason for reason in FinishReason}
_CONTINUATIONS = {continuation.value: continuation for continuation in Continuation}


def _spans(stored: str) -> tuple[VersionSpan, ...]:
    return tuple(
        [VersionSpan(version=version, start=start, end=end) for version, start, end in _SPANS.decode(stored)]
    )


@lru_cache(maxsize=512)
def _sampling(stored: str) -> SamplingParameters:
    """Most turns of a run were drawn alike."""
    return msgspec.json.decode(stored, type=SamplingParameters)


def _stored_turn(
    id_: str,
    parent_id: str | None,
    prefix_tokens: int,
    prompt_ids: bytes,
    output_ids: bytes,
    output_logprobs: bytes,
    spans: str,
    sampling: str,
    state: str,
    finish_reason: str,
    continuation: str,
    started_at: float,
    finished_at: float,
    masked: str | None,
) -> StoredTurn:
    return StoredTurn(
        id=TurnId(id_),
        parent_id=None if parent_id is None else TurnId(parent_id),
        prefix_tokens=prefix_tokens,
        prompt_ids=prompt_ids,
        output_ids=output_ids,
        output_logprobs=output_logprobs,
        spans=_spans(spans),
        sampling=_sampling(sampling),
        state=_STATES[state],
        finish_reason=_FINISH_REASONS[finish_reason],
        continuation=_CONTINUATIONS[continuation],
        started_at=started_at,
        finished_at=finished_at,
        masked=() if masked is None else _MASKED.decode(masked),
    )
