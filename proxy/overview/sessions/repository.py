"""The queries of lists of sessions, single sessions and their turns. Each is bounded by an index or by a page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from sqlalchemy import ColumnElement, Connection, FromClause, Select, and_, or_, select, tuple_
from sqlalchemy.sql.base import ReadOnlyColumnCollection

from proxy.contract.states import SessionState
from proxy.database.prepared import unindexed
from proxy.database.rows import AnyRow
from proxy.database.tables import GroupRow, JudgementRow, SessionRow, TurnRow
from proxy.lifecycle.lifecycle import is_open
from proxy.lifecycle.turn_requests import turns_as_sent
from proxy.overview.filters import Cursor, SessionFilter

_Columns = ReadOnlyColumnCollection[str, Any]

# How many sessions one page of a filtered list searches: some milliseconds of work, however large the store.
SEARCHED = 4096
# A judge that fails again and again leaves a row for each attempt.
_MOST_JUDGEMENTS = 200


class SessionOverviewRepository:
    """Queries that run within one read transaction."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def _all(self, statement: Select[*tuple[Any, ...]]) -> Sequence[AnyRow]:
        return self._connection.execute(statement).all()

    def judgements_of(self, session_id: str) -> Sequence[AnyRow]:
        """Return the newest attempts of judges at the session, in order of arrival."""
        newest = (
            select(JudgementRow.id)
            .where(JudgementRow.session_id == session_id)
            .order_by(JudgementRow.created_at.desc(), JudgementRow.id.desc())
            .limit(_MOST_JUDGEMENTS)
        )
        statement = select(JudgementRow.__table__).where(JudgementRow.id.in_(newest))
        return self._all(statement.order_by(JudgementRow.created_at, JudgementRow.id))

    def sessions(self, run_id: str, wanted: SessionFilter, *, after: Cursor | None, limit: int) -> Sequence[AnyRow]:
        """Return sessions after the cursor, newest first. A search without an index ends at `searched_to`."""
        by_time: ColumnElement[float] = SessionRow.created_at.expression
        if wanted.is_searched:
            searched = _newest(run_id, after, _SEARCHED_COLUMNS).limit(SEARCHED).subquery()
            found = select(searched.c.id).where(*_matching(wanted, searched.c))
            found = found.order_by(searched.c.created_at.desc(), searched.c.id.desc()).limit(limit)
            statement = _SESSIONS.where(SessionRow.id.in_(found.subquery().select()))
            return self._all(statement.order_by(by_time.desc(), SessionRow.id.desc()))
        # Steer SQLite to the most selective index: a group is smaller than its run. The index on names begins with
        # the run.
        by_group = wanted.group is not None and wanted.name is None
        of_run = unindexed(SessionRow.run_id) if by_group else SessionRow.run_id
        conditions = [of_run == run_id, *_matching(wanted, SessionRow.__table__.c)]
        if after is not None:
            conditions.append(_below(after))
        if wanted.state == SessionState.OPEN:
            conditions.append(is_open())
        if wanted.group is not None:
            named = and_(GroupRow.run_id == run_id, GroupRow.name == wanted.group)
            groups = select(GroupRow.id).where(or_(GroupRow.id == wanted.group, named))
            conditions.append(SessionRow.group_id.in_(groups))
        if wanted.name is not None:
            conditions.append(SessionRow.external_id == wanted.name)
        if wanted.state == SessionState.OPEN or wanted.group is not None or wanted.name is not None:
            # The few sessions that their own index finds are sorted; on the index of times SQLite would walk the run.
            by_time = unindexed(SessionRow.created_at)
        statement = _SESSIONS.where(*conditions).order_by(by_time.desc(), SessionRow.id.desc())
        return self._all(statement.limit(limit))

    def searched_to(self, run_id: str, after: Cursor | None) -> AnyRow | None:
        """Return `id` and `created_at` of the last session that one search visits; None if it reaches the end."""
        statement = (
            _newest(run_id, after, (SessionRow.id.expression, SessionRow.created_at.expression))
            .offset(SEARCHED - 1)
            .limit(2)
        )
        rows = self._all(statement)
        return rows[0] if len(rows) == 2 else None

    def session(self, session_id: str) -> AnyRow | None:
        return self._connection.execute(_SESSIONS.where(SessionRow.id == session_id)).one_or_none()

    def turns_of(self, session_id: str) -> Sequence[AnyRow]:
        return self._all(_TURNS.where(TurnRow.session_id == session_id).order_by(TurnRow.ordinal, TurnRow.id))

    def turn(self, turn_id: str) -> AnyRow | None:
        return self._connection.execute(_TURNS.where(TurnRow.id == turn_id)).one_or_none()


def _newest(run_id: str, after: Cursor | None, columns: Iterable[ColumnElement[Any]]) -> Select[*tuple[Any, ...]]:
    """Select a run's sessions after the cursor, newest first."""
    statement = select(*columns).where(SessionRow.run_id == run_id)
    if after is not None:
        statement = statement.where(_below(after))
    return statement.order_by(SessionRow.created_at.desc(), SessionRow.id.desc())


def _matching(wanted: SessionFilter, columns: _Columns) -> list[ColumnElement[bool]]:
    """Return the conditions on a session's own columns, except for the open state, which has an index of its own."""
    conditions: list[ColumnElement[bool]] = []
    if wanted.state is not None and wanted.state != SessionState.OPEN:
        conditions.append(columns["state"] == wanted.state)
    if wanted.training is not None:
        conditions.append(columns["training"] == wanted.training)
    if wanted.attributed_by is not None:
        conditions.append(columns["attributed_by"] == wanted.attributed_by)
    if wanted.min_reward is not None:
        conditions.append(columns["reward"] >= wanted.min_reward)
    if wanted.max_reward is not None:
        conditions.append(columns["reward"] <= wanted.max_reward)
    return conditions


def _below(cursor: Cursor) -> ColumnElement[bool]:
    return tuple_(SessionRow.created_at, SessionRow.id) < (cursor.at, cursor.key)


_SESSIONS_AND_GROUPS: FromClause = SessionRow.__table__.outerjoin(
    GroupRow.__table__, SessionRow.group_id == GroupRow.id
)
_SESSIONS = select(SessionRow.__table__, GroupRow.name.label("group_name")).select_from(_SESSIONS_AND_GROUPS)

_SEARCHED_COLUMNS = [
    SessionRow.__table__.c[name] for name in ("id", "created_at", "state", "training", "attributed_by", "reward")
]

_TURNS = turns_as_sent()
