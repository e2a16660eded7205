"""Reads sessions from the store as records. One transaction reads a whole session, so its parts are consistent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from sqlalchemy import Connection, select, tuple_

from proxy.contract.arrays import unpack_ids, unpack_logprobs
from proxy.contract.export import SESSION_FORMAT
from proxy.contract.identifiers import TurnId
from proxy.contract.reward import RewardRules
from proxy.contract.states import SessionState, TrainingState
from proxy.contract.trajectory import Purpose
from proxy.contract.turn import Continuation, FinishReason, SamplingParameters, TurnState
from proxy.database.rows import AnyRow
from proxy.database.tables import GroupRow, RewardRow, RunRow, SessionRow, TurnRow
from proxy.lifecycle.combining import LedgerEntry, session_rewards
from proxy.lifecycle.turn_requests import turns_as_sent
from proxy.transfer.conversation import messages_of, tools_of
from proxy.transfer.records import RewardRecord, SessionRecord, TurnRecord


class ExportFilter(msgspec.Struct, frozen=True, kw_only=True):
    """A selection of sessions; None means any.

    `since` and `until` (exclusive) bound the start of a session, in seconds since the epoch. `version` selects
    sessions with a token of that version; `min_reward` omits sessions without a reward too. `sessions` are ids.
    """

    since: float | None = None
    until: float | None = None
    version: int | None = None
    min_reward: float | None = None
    purpose: Purpose | None = None
    state: SessionState | None = None
    training: TrainingState | None = None
    task: str | None = None
    sessions: tuple[str, ...] | None = None


class Place(msgspec.Struct, frozen=True):
    """The last session of a page; the next page begins after it."""

    created_at: float
    id: str


class TransferReader:
    """Queries that run within one read transaction."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def page(
        self, run_id: str, wanted: ExportFilter, after: Place | None, *, rules: RewardRules, limit: int
    ) -> tuple[list[SessionRecord], Place | None]:
        """Return the sessions after `after`, oldest first, and the place where the page ends; None if it is the last
        page. Erased sessions are omitted."""
        statement = _SESSIONS.where(SessionRow.run_id == run_id, SessionRow.erased_at.is_(None), *_bounds(wanted))
        if after is not None:
            behind = tuple_(SessionRow.created_at, SessionRow.id) > (after.created_at, after.id)
            # The first condition follows from the second; it lets the database use the index on the time.
            statement = statement.where(SessionRow.created_at >= after.created_at, behind)
        order = (SessionRow.created_at, SessionRow.id)
        rows = self._connection.execute(statement.order_by(*order).limit(limit)).all()
        records = [self._record(row, rules) for row in rows]
        return records, Place(rows[-1].created_at, rows[-1].id) if len(rows) == limit else None

    def named(self, ids: Sequence[str], *, rules: RewardRules) -> dict[str, SessionRecord]:
        """Return those of the sessions that exist and are not erased, by id."""
        rows = self._connection.execute(_SESSIONS.where(SessionRow.id.in_(ids), SessionRow.erased_at.is_(None))).all()
        return {row.id: self._record(row, rules) for row in rows}

    def _record(self, row: AnyRow, rules: RewardRules) -> SessionRecord:
        turn_rows = self._connection.execute(
            _TURNS.where(TurnRow.session_id == row.id).order_by(TurnRow.ordinal, TurnRow.id)
        ).all()
        ledger = self._connection.execute(
            select(RewardRow.__table__).where(RewardRow.session_id == row.id).order_by(RewardRow.sequence)
        ).all()
        ordered = _parents_first(turn_rows)
        positions = {turn.id: index for index, turn in enumerate(ordered)}
        rewards = session_rewards([_entry(entry) for entry in ledger], rules).turn_rewards
        turns = tuple(_turn(turn, positions, rewards) for turn in ordered)
        return SessionRecord(
            format=SESSION_FORMAT,
            session_id=row.id,
            run=row.run_name,
            origin=row.origin,
            external_id=row.external_id,
            group=row.group_name,
            group_size=row.group_size,
            task=row.task,
            purpose=Purpose(row.purpose),
            metadata=row.metadata,
            attributed_by=row.attributed_by,
            state=row.state,
            training=row.training,
            outcome=row.outcome,
            end_reason=row.end_reason,
            consumed_by=row.consumed_by,
            reward=row.reward,
            created_at=row.created_at,
            last_active_at=row.last_active_at,
            ended_at=row.ended_at,
            messages=messages_of(turns),
            tools=tools_of(turns),
            turns=turns,
            rewards=tuple(_reward(entry, positions) for entry in ledger),
        )


_SESSIONS = (
    select(
        SessionRow.__table__,
        RunRow.name.label("run_name"),
        GroupRow.name.label("group_name"),
        GroupRow.size.label("group_size"),
    )
    .join(RunRow, RunRow.id == SessionRow.run_id)
    .join(GroupRow, GroupRow.id == SessionRow.group_id, isouter=True)
)

_TURNS = turns_as_sent()


def _bounds(wanted: ExportFilter) -> list[Any]:
    exact = {
        SessionRow.purpose: wanted.purpose.value if wanted.purpose is not None else None,
        SessionRow.state: wanted.state,
        SessionRow.training: wanted.training,
        SessionRow.task: wanted.task,
    }
    bounds: list[Any] = [column == value for column, value in exact.items() if value is not None]
    if wanted.since is not None:
        bounds.append(SessionRow.created_at >= wanted.since)
    if wanted.until is not None:
        bounds.append(SessionRow.created_at < wanted.until)
    if wanted.min_reward is not None:
        bounds.append(SessionRow.reward >= wanted.min_reward)
    if wanted.sessions is not None:
        bounds.append(SessionRow.id.in_(wanted.sessions))
    if wanted.version is not None:
        bounds += [SessionRow.oldest_version <= wanted.version, SessionRow.newest_version >= wanted.version]
    return bounds


def _parents_first(turns: Sequence[AnyRow]) -> list[AnyRow]:
    """Return the turns in their order, except that a turn recorded before its parent follows the parent. Turns whose
    parent is missing come last."""
    ordered: list[AnyRow] = []
    placed: set[str | None] = {None}
    waiting = list(turns)
    while waiting:
        later = []
        for turn in waiting:
            if turn.parent_id in placed:
                ordered.append(turn)
                placed.add(turn.id)
            else:
                later.append(turn)
        if len(later) == len(waiting):
            return ordered + later
        waiting = later
    return ordered


def _turn(row: AnyRow, positions: Mapping[str, int], rewards: Mapping[TurnId, float]) -> TurnRecord:
    return TurnRecord(
        id=row.id,
        parent=positions[row.parent_id] if row.parent_id is not None else None,
        prefix_tokens=row.prefix_tokens,
        prompt_ids=unpack_ids(row.prompt_ids),
        output_ids=unpack_ids(row.output_ids),
        logprobs=unpack_logprobs(row.output_logprobs),
        versions=tuple((version, start, end) for version, start, end in row.spans),
        masked=tuple((start, end) for start, end in row.masked or ()),
        sampling=msgspec.convert(row.sampling, SamplingParameters),
        finish_reason=FinishReason(row.finish_reason),
        continuation=Continuation(row.continuation),
        state=TurnState(row.state),
        attributed_by=row.attributed_by,
        prompt_token_count=row.prompt_token_count,
        started_at=row.started_at,
        first_token_at=row.first_token_at,
        finished_at=row.finished_at,
        conversation_hash=bytes(row.conversation_hash).hex(),
        settled_hash=bytes(row.settled_hash).hex() if row.settled_hash is not None else None,
        tools_hash=bytes(row.tools_hash).hex(),
        messages=row.messages,
        request=row.request,
        response=row.response,
        reward=rewards.get(row.id),
    )


def _reward(row: AnyRow, positions: Mapping[str, int]) -> RewardRecord:
    return RewardRecord(
        id=row.id,
        turn=positions[row.turn_id] if row.turn_id is not None else None,
        name=row.name,
        value=row.value,
        source=row.source,
        comment=row.comment,
        after_training=row.after_training,
        created_at=row.created_at,
    )


def _entry(row: AnyRow) -> LedgerEntry:
    return LedgerEntry(
        id=row.id, turn_id=row.turn_id, name=row.name, source=row.source, value=row.value, created_at=row.created_at
    )
