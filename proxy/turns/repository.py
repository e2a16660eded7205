"""Queries of turns: parents of calls, answers, and the turns of trajectories."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import msgspec
from sqlalchemy import (
    ColumnElement,
    Connection,
    Select,
    Text,
    and_,
    bindparam,
    cast,
    select,
    true,
)

from proxy.contract.arrays import widened_ids
from proxy.contract.identifiers import TurnId
from proxy.contract.token_ids import TokenIds
from proxy.contract.turn import Continuation, FinishReason, SamplingParameters, TurnState, VersionSpan
from proxy.database.prepared import Prepared, among, given_rows
from proxy.database.rows import AnyRow
from proxy.database.tables import SessionRow, TurnRow
from proxy.lifecycle.lifecycle import is_open
from proxy.turns.assembly import PathPiece, StoredTurn

# Hashes per statement: SQLite bounds the number of parameters, and mostly one of the first is found.
_HASHES = 500
# Sessions per statement: bounds the memory for the rows, as a session may have megabytes.
_SESSIONS = 64


class TurnRepository:
    """Reads of turns within one transaction."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def by_conversation(
        self, session_id: str, hashes: Sequence[bytes], *, tools_hash: bytes | None = None, named: Sequence[str] = ()
    ) -> str | None:
        """Return the session's turn with the first of `hashes`, longest conversation first.

        Turns with `tools_hash` come before all others. Of several turns with one hash, a `named` one is returned,
        else the newest.
        """
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
        """Return the ids of the session's newest turns, newest first, without failed ones and shadow answers."""
        statement = (
            select(TurnRow.id)
            .where(TurnRow.session_id == session_id, goes_on())
            .order_by(TurnRow.ordinal.desc())
            .limit(limit)
        )
        return list((self._connection.execute(statement)).scalars())

    def pieces(self, turn_ids: Sequence[str]) -> dict[str, PathPiece]:
        """Return the turns and all their ancestors, by id."""
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

    def heads(self, turn_ids: Sequence[str]) -> list[AnyRow]:
        """Return the columns of these turns that a later call needs besides their paths."""
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
        """Return the conversation hashes of turns with this tools hash in the run's open sessions, those of the most
        recently active sessions first."""
        statement = (
            select(TurnRow.conversation_hash)
            .join(SessionRow, SessionRow.id == TurnRow.session_id)
            .where(
                SessionRow.run_id == run_id,
                is_open(),
                TurnRow.tools_hash == tools_hash,
                goes_on(),
            )
            .order_by(SessionRow.last_active_at.desc())
            .limit(limit)
        )
        return list(self._connection.execute(statement).scalars())

    def turns_of(self, turn_counts: Mapping[str, int]) -> dict[str, list[StoredTurn]]:
        """Return each session's turns in order: of the first `turn_counts[session]`, those that began before its
        end, and no turn that continues a later one."""
        turns: dict[str, list[StoredTurn]] = {session_id: [] for session_id in turn_counts}
        session_ids = list(turn_counts)
        for start in range(0, len(session_ids), _SESSIONS):
            part = session_ids[start : start + _SESSIONS]
            for session_id, ordinal, *columns in self._trainable_turns(part):
                if ordinal < turn_counts[session_id]:
                    turns[session_id].append(_stored_turn(*columns))
        return {session_id: _rooted(found) for session_id, found in turns.items()}

    def _trainable_turns(self, session_ids: Sequence[str]) -> Sequence[tuple[Any, ...]]:
        """Return the columns of `_TRAINABLE`, by session and in order."""
        if self._connection.dialect.name == "postgresql":
            return _TRAINABLE_TURNS_OF_GIVEN.run(self._connection, {"session": session_ids})
        return _TRAINABLE_TURNS.run(self._connection, {"ids": session_ids})


def _rooted(turns: list[StoredTurn]) -> list[StoredTurn]:
    """Return the turns whose ancestors are all among them.

    A parent is missing if it began after the end of the session, and the clock was set back before its child began.
    The child came after the end too, whatever its time says, and without it the earlier turns are still a tree.
    """
    while True:
        known = {turn.id for turn in turns}
        kept = [turn for turn in turns if turn.parent_id is None or turn.parent_id in known]
        if len(kept) == len(turns):
            return turns
        turns = kept


def goes_on() -> ColumnElement[bool]:
    """Return the condition that a conversation may go on from a turn: it is an answer that a client may have."""
    return and_(TurnRow.state != TurnState.FAILED.value, TurnRow.state != TurnState.SHADOW.value)


_BY_CONVERSATION = (
    select(TurnRow.id, TurnRow.conversation_hash, TurnRow.tools_hash)
    .where(
        TurnRow.session_id == bindparam("session"),
        TurnRow.conversation_hash.in_(bindparam("hashes", expanding=True)),
        goes_on(),
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
    """Return the statement for PostgreSQL, with an index look-up for each session."""
    # For a plain join PostgreSQL also considers scans of all turns and sessions, and often chooses them.
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
    # Cached: most turns of a run have the same sampling parameters.
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
