"""The queries of the reward ledger. An index finds each page, whatever the filter."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sqlalchemy import ColumnElement, Connection, and_, bindparam, func, select, tuple_

from proxy.contract.states import ClaimState
from proxy.database.prepared import Prepared, unindexed
from proxy.database.rows import AnyRow
from proxy.database.tables import (
    ClaimedSessionRow,
    ClaimRow,
    PolicyVersionRow,
    RewardRow,
    RunRow,
    SessionRow,
    TurnRow,
)
from proxy.lifecycle.combining import LedgerEntry
from proxy.lifecycle.lifecycle import ledger_of
from proxy.lifecycle.preferences import preferences_about
from proxy.lifecycle.session_names import session_called
from proxy.overview.filters import Cursor
from proxy.overview.rewards.views import RewardFilter

_BY_ID = Prepared(select(SessionRow.id, SessionRow.run_id).where(SessionRow.id == bindparam("of")))


class LedgerRepository:
    """Queries that run within one read transaction."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def run_ids(self) -> list[str]:
        return list(self._connection.execute(select(RunRow.id)).scalars())

    def session_id(self, run_id: str, name: str) -> str | None:
        """Return the id of the session with this id, or of the newest one with this name."""
        row = session_called(self._connection, name, run_id, _BY_ID)
        return row[0] if row is not None else None

    def session_of_turn(self, turn_id: str) -> str | None:
        statement = select(TurnRow.session_id).where(TurnRow.id == turn_id)
        return self._connection.execute(statement).scalar_one_or_none()

    def page(self, run_id: str, wanted: RewardFilter, *, after: Cursor | None, limit: int) -> Sequence[AnyRow]:
        """Return entries of the run, newest first. The cursor's key is a sequence number, `wanted.session` an id."""
        conditions: list[ColumnElement[bool]] = [RewardRow.run_id == run_id]
        for column, value in (
            (RewardRow.session_id, wanted.session),
            (RewardRow.turn_id, wanted.turn),
            (RewardRow.name, wanted.name),
            (RewardRow.source, wanted.source),
        ):
            if value is not None:
                conditions.append(column == value)
        if wanted.since is not None:
            conditions.append(RewardRow.created_at >= wanted.since)
        if wanted.after_training is not None:
            late: ColumnElement[bool] = RewardRow.after_training.expression
            conditions.append(late if wanted.after_training else ~late)
        if after is not None:
            conditions.append(tuple_(RewardRow.created_at, RewardRow.sequence) < (after.at, int(after.key)))
        statement = select(RewardRow.__table__).where(*conditions)
        statement = statement.order_by(RewardRow.created_at.desc(), RewardRow.sequence.desc()).limit(limit)
        return self._connection.execute(statement).all()

    def ledgers(self, session_ids: Sequence[str]) -> dict[str, list[LedgerEntry]]:
        """Return all entries by session, in order of arrival."""
        return ledger_of(self._connection, session_ids)

    def revised(self, run_id: str, *, after: Cursor | None, limit: int) -> Sequence[AnyRow]:
        """Return revised sessions with their trained rewards, the last revised first. The cursor's key is a session
        id."""
        conditions = [SessionRow.run_id == run_id, SessionRow.revised_at.is_not(None)]
        if after is not None:
            conditions.append(tuple_(SessionRow.revised_at, SessionRow.id) < (after.at, after.key))
        statement = _REVISED.where(*conditions)
        statement = statement.order_by(SessionRow.revised_at.desc(), SessionRow.id.desc()).limit(limit)
        return self._connection.execute(statement).all()

    def entries(self, session_ids: Sequence[str]) -> Sequence[AnyRow]:
        """Return the rows of the sessions' entries, in order of arrival."""
        if not session_ids:
            return ()
        statement = select(RewardRow.__table__).where(RewardRow.session_id.in_(session_ids))
        return self._connection.execute(statement.order_by(RewardRow.sequence)).all()

    def trainings_of(self, session_ids: Sequence[str]) -> Sequence[AnyRow]:
        """Return the committed claims of these sessions: `session_id`, `claim_id`, `reward`, `reward_ids`,
        `version`."""
        if not session_ids:
            return ()
        return self._connection.execute(_TRAININGS.where(ClaimedSessionRow.session_id.in_(session_ids))).all()

    def names_of(self, session_ids: Iterable[str]) -> dict[str, str]:
        """Return the client's own names by session id; sessions without a name are omitted."""
        statement = select(SessionRow.id, SessionRow.external_id).where(
            SessionRow.id.in_(set(session_ids)), SessionRow.external_id.is_not(None)
        )
        return {row.id: row.external_id for row in self._connection.execute(statement)}

    def preferences_of(self, session_id: str) -> Sequence[AnyRow]:
        """Return the preferences about a session, in order of arrival."""
        return list(self._connection.execute(preferences_about(session_id)).all())

    def revised_count(self, run_id: str) -> int:
        statement = select(func.count()).where(SessionRow.run_id == run_id, SessionRow.revised_at.is_not(None))
        return int(self._connection.execute(statement).scalar_one())


_REVISED = (
    select(
        SessionRow.id,
        SessionRow.external_id,
        SessionRow.task,
        SessionRow.consumed_by,
        SessionRow.claim_id,
        SessionRow.revised_at,
        SessionRow.reward.label("reward_now"),
        ClaimedSessionRow.reward.label("reward_then"),
        ClaimedSessionRow.reward_ids,
        ClaimRow.reward_rules,
        PolicyVersionRow.created_at.label("trained_at"),
    )
    .join(
        ClaimedSessionRow,
        and_(ClaimedSessionRow.session_id == SessionRow.id, ClaimedSessionRow.claim_id == SessionRow.claim_id),
    )
    .join(ClaimRow, ClaimRow.id == SessionRow.claim_id)
    .join(
        PolicyVersionRow,
        and_(PolicyVersionRow.run_id == SessionRow.run_id, PolicyVersionRow.version == SessionRow.consumed_by),
    )
)

_TRAININGS = (
    select(
        ClaimedSessionRow.session_id,
        ClaimedSessionRow.claim_id,
        ClaimedSessionRow.reward,
        ClaimedSessionRow.reward_ids,
        ClaimRow.committed_version.label("version"),
    )
    .join(ClaimRow, ClaimRow.id == ClaimedSessionRow.claim_id)
    .where(unindexed(ClaimRow.state) == ClaimState.COMMITTED.value, ClaimRow.committed_version.is_not(None))
)
