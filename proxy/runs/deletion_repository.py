"""Rows of a run that is deleted, removed in parts."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from sqlalchemy import Connection, delete, func, or_, select, text, update

from proxy.contract.states import RunState
from proxy.database.rows import AnyRow
from proxy.database.tables import (
    AnswerPairRow,
    ApiKeyRow,
    Base,
    ClaimedSessionRow,
    ClaimRow,
    EventRow,
    FeedbackTextRow,
    GroupRow,
    JobRow,
    JudgementRow,
    PolicyVersionRow,
    PreferenceRow,
    RewardRow,
    RunRow,
    SessionRow,
    SessionUserRow,
    TokenAuditRow,
    TurnRow,
    WebhookRow,
)
from proxy.runs.repository import delete_used_limits

# Bounds of one transaction, which other writes wait for.
_SESSIONS_AT_ONCE = 64
_TURNS_AT_ONCE = 200
_ROWS_AT_ONCE = 500

# Both databases look for rows that refer to a deleted one. Calls never search these columns, so they have no index,
# and each deleted turn or session would cost a walk through the table. The indexes exist while runs are deleted.
_REFERENCES = (
    ("turns", "parent_id"),
    ("turns", "request_of"),
    ("rewards", "turn_id"),
    ("feedback_texts", "turn_id"),
    ("preferences", "chosen_turn_id"),
    ("preferences", "rejected_turn_id"),
    ("answer_pairs", "turn_id"),
    ("api_keys", "session_id"),
)

# Tables whose rows refer to sessions, turns among them: rows that refer to turns are deleted before the turns.
_REFERRING = (
    RewardRow,
    FeedbackTextRow,
    JudgementRow,
    AnswerPairRow,
    TokenAuditRow,
    SessionUserRow,
    ClaimedSessionRow,
    TurnRow,
    ApiKeyRow,
)


class RunData(msgspec.Struct, frozen=True, kw_only=True):
    """The amount of data that goes with a run. `bytes` are those of its own versions' weights."""

    sessions: int
    turns: int
    versions: int
    bytes: int


class DeletionRepository:
    """Writes of one transaction."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def amount(self, run_id: str) -> RunData:
        """Count what is deleted with the run. Version 0 is not counted: its weights are never the run's own."""
        sessions = select(func.count(), func.coalesce(func.sum(SessionRow.turn_count), 0))
        versions = select(func.count(), func.coalesce(func.sum(PolicyVersionRow.weights_bytes), 0))
        session_count, turns = self._connection.execute(sessions.where(SessionRow.run_id == run_id)).one()
        version_count, size = self._connection.execute(
            versions.where(PolicyVersionRow.run_id == run_id, PolicyVersionRow.version > 0)
        ).one()
        return RunData(sessions=session_count, turns=int(turns or 0), versions=version_count, bytes=int(size or 0))

    def hide(self, run_id: str) -> None:
        """Mark the run as deleted, free its name, and delete its keys and webhooks. From now on nobody finds the
        run."""
        # No name has a space, so this one clashes with none and cannot be asked for.
        values = {"state": RunState.DELETED.value, "name": f"deleted {run_id}"}
        self._connection.execute(update(RunRow).where(RunRow.id == run_id).values(**values))
        delete_used_limits(self._connection, run_id)
        for table in (ApiKeyRow, WebhookRow):
            self._connection.execute(delete(table).where(table.run_id == run_id))

    def hidden(self) -> list[str]:
        """Return the runs that are marked as deleted."""
        statement = select(RunRow.id).where(RunRow.state == RunState.DELETED.value).order_by(RunRow.id)
        return list(self._connection.execute(statement).scalars())

    def add_indexes(self) -> None:
        for table, column in _REFERENCES:
            self._connection.execute(
                text(f"CREATE INDEX IF NOT EXISTS {_index(table, column)} ON {table} ({column})")
            )

    def drop_indexes(self) -> None:
        for table, column in _REFERENCES:
            self._connection.execute(text(f"DROP INDEX IF EXISTS {_index(table, column)}"))

    def delete_sessions(self, run_id: str) -> list[str]:
        """Delete some sessions with everything in them, and return them; none if none are left."""
        first = (
            select(SessionRow.id, SessionRow.turn_count)
            .where(SessionRow.run_id == run_id)
            .order_by(SessionRow.id)
            .limit(_SESSIONS_AT_ONCE)
        )
        ids: list[str] = []
        turns = 0
        for row in self._connection.execute(first).all():
            if ids and turns + row.turn_count > _TURNS_AT_ONCE:
                break
            ids.append(row.id)
            turns += row.turn_count
        if not ids:
            return []
        in_preference = or_(PreferenceRow.chosen_session_id.in_(ids), PreferenceRow.rejected_session_id.in_(ids))
        self._connection.execute(delete(PreferenceRow).where(in_preference))
        # Referring rows first: PostgreSQL enforces foreign keys statement by statement. Turns refer to turns of their
        # own session only, so that all of a session's go in one statement.
        for table in _REFERRING:
            self._connection.execute(delete(table).where(table.session_id.in_(ids)))
        self._connection.execute(delete(SessionRow).where(SessionRow.id.in_(ids)))
        return ids

    def delete_some(self, run_id: str) -> bool:
        """Delete some rows that no session refers to any more. Return False if none are left."""
        tables = ((ClaimRow, ClaimRow.id), (GroupRow, GroupRow.id), (EventRow, EventRow.id), (JobRow, JobRow.id))
        for table, key in tables:
            some = select(key).where(table.run_id == run_id).limit(_ROWS_AT_ONCE).scalar_subquery()
            if self._connection.execute(delete(table).where(key.in_(some))).rowcount:
                return True
        return False

    def own_weights(self, run_id: str) -> list[str]:
        """Return the directories of the run's versions that no other run's version shares."""
        others = select(PolicyVersionRow.weights_uri).where(
            PolicyVersionRow.run_id != run_id, PolicyVersionRow.weights_uri.is_not(None)
        )
        statement = select(PolicyVersionRow.weights_uri).where(
            PolicyVersionRow.run_id == run_id,
            PolicyVersionRow.version > 0,
            PolicyVersionRow.weights_uri.is_not(None),
            PolicyVersionRow.weights_uri.not_in(others),
        )
        return [str(uri) for uri in self._connection.execute(statement.distinct()).scalars()]

    def delete_rest(self, run_id: str) -> bool:
        """Delete the run's row and every row that still refers to it. Return False if there was no such row."""
        # A call or a commit that began before the run was hidden may have written since the parts were deleted.
        while self.delete_sessions(run_id):
            pass
        claims = select(ClaimRow.id).where(ClaimRow.run_id == run_id)
        self._connection.execute(delete(ClaimedSessionRow).where(ClaimedSessionRow.claim_id.in_(claims)))
        for table in reversed(Base.metadata.sorted_tables):  # referring tables first, those of later releases too
            if "run_id" in table.columns:
                self._connection.execute(delete(table).where(table.columns.run_id == run_id))
        return self._connection.execute(delete(RunRow).where(RunRow.id == run_id)).rowcount > 0


def find_hidden(connection: Connection) -> list[str]:
    """Return the runs that are marked as deleted."""
    return DeletionRepository(connection).hidden()


def described(rows: Sequence[AnyRow]) -> str:
    """Return the runs that begin from another one, each with the version that it begins from."""
    return ", ".join(f"{row.name} (from version {row.begun_from_version})" for row in rows)


def _index(table: str, column: str) -> str:
    return f"ix_deletion_{table}_{column}"
