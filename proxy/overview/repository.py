"""The queries behind the pages and the operating API. None counts or skips through turns: every one is bounded by an
index, by a page, or by the number of sessions (`counted`, `reward_buckets`: those are asked for rarely)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Connection,
    FromClause,
    Row,
    Select,
    Text,
    and_,
    cast,
    func,
    or_,
    select,
    tuple_,
    union_all,
    update,
)
from sqlalchemy.sql.base import ReadOnlyColumnCollection

from proxy.contract.policy import VersionState
from proxy.contract.states import ClaimState, SessionState, TrainingState
from proxy.contract.trajectory import Purpose
from proxy.database.prepared import unindexed
from proxy.database.tables import (
    ClaimedSessionRow,
    ClaimRow,
    EventRow,
    GroupRow,
    PolicyVersionRow,
    RewardRow,
    RunRow,
    SessionRow,
    TurnRow,
)
from proxy.lifecycle.lifecycle import is_open
from proxy.lifecycle.turn_requests import turns_as_sent
from proxy.overview.filters import Cursor, SessionFilter

AnyRow = Row[*tuple[Any, ...]]
_Columns = ReadOnlyColumnCollection[str, Any]

_LOGPROB_BYTES = 4
SEARCHED = 4096
"""How many sessions one page of a filtered list goes through."""

_LOOKED_THROUGH = 4096
"""The number of ended sessions that are searched for the last rewarded ones."""


class OverviewRepository:
    """Reads of one look at the store; the one write is a run's state."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def _all(self, statement: Select[*tuple[Any, ...]]) -> Sequence[AnyRow]:
        return self._connection.execute(statement).all()

    # Runs

    def runs(self) -> Sequence[AnyRow]:
        return self._all(select(RunRow.__table__).order_by(RunRow.created_at, RunRow.id))

    def run(self, name_or_id: str) -> AnyRow | None:
        statement = select(RunRow.__table__).where(or_(RunRow.name == name_or_id, RunRow.id == name_or_id))
        # A run may be named like another's id; its name wins, as it does for agents.
        return self._connection.execute(statement.order_by(RunRow.name != name_or_id).limit(1)).first()

    def set_run_state(self, run_id: str, state: str, *, unless: str) -> bool:
        """Whether the state changed."""
        statement = (
            update(RunRow).where(RunRow.id == run_id, RunRow.state.not_in((state, unless))).values(state=state)
        )
        return self._connection.execute(statement).rowcount > 0

    def pause_reason(self, run_id: str) -> str | None:
        """Return the reason given when the run was last paused; None if none was."""
        statement = (
            select(EventRow.data)
            .where(EventRow.run_id == run_id, EventRow.kind == "run.paused")
            .order_by(EventRow.id.desc())
            .limit(1)
        )
        data = self._connection.execute(statement).scalar_one_or_none()
        return None if data is None else data.get("reason")

    def rejected_beyond(self, run_id: str, head: int) -> AnyRow | None:
        """`version` and `rejected_because` of the newest rejected version after the head, if there is one."""
        statement = (
            select(PolicyVersionRow.version, PolicyVersionRow.rejected_because)
            .where(
                PolicyVersionRow.run_id == run_id,
                PolicyVersionRow.version > head,
                PolicyVersionRow.state == VersionState.REJECTED.value,
            )
            .order_by(PolicyVersionRow.version.desc())
            .limit(1)
        )
        return self._connection.execute(statement).one_or_none()

    def counted(self) -> Sequence[AnyRow]:
        """`sessions`, `turns` and `last_active_at` by `run_id` and `training`, of all runs. Walks all sessions."""
        statement = select(
            SessionRow.run_id,
            SessionRow.training,
            func.count().label("sessions"),
            func.sum(SessionRow.turn_count).label("turns"),
            func.max(SessionRow.last_active_at).label("last_active_at"),
        ).group_by(SessionRow.run_id, SessionRow.training)
        return self._all(statement)

    def open_sessions(self, run_id: str) -> int:
        statement = select(func.count()).where(is_open(), SessionRow.run_id == run_id)
        return int(self._connection.execute(statement).scalar_one())

    def last_rewards(self, run_id: str, count: int) -> list[tuple[str | None, float]]:
        """Group and reward of the last ended and rewarded training sessions, newest first."""
        ended = (
            select(SessionRow.ended_at, SessionRow.reward, SessionRow.purpose, SessionRow.group_id)
            .where(SessionRow.run_id == run_id, SessionRow.ended_at.is_not(None))
            .order_by(SessionRow.ended_at.desc())
            .limit(_LOOKED_THROUGH)
            .subquery()
        )
        statement = (
            select(ended.c.group_id, ended.c.reward)
            .where(ended.c.reward.is_not(None), ended.c.purpose == Purpose.TRAIN.value)
            .order_by(ended.c.ended_at.desc())
            .limit(count)
        )
        return [(row.group_id, row.reward) for row in self._all(statement)]

    def late_rewards(self, run_id: str) -> int:
        """Entries that came after training, by an index that has no others."""
        statement = select(func.count()).where(RewardRow.run_id == run_id, RewardRow.after_training)
        return int(self._connection.execute(statement).scalar_one())

    def recent_turns(self, run_id: str, sessions: int) -> Sequence[AnyRow]:
        """Count `turns` by `continuation`, `attributed_by`, `finish_reason` and `state` in the last `sessions`
        sessions."""
        recent = (
            select(SessionRow.id)
            .where(SessionRow.run_id == run_id)
            .order_by(SessionRow.created_at.desc())
            .limit(sessions)
            .subquery()
        )
        kinds = (TurnRow.continuation, TurnRow.attributed_by, TurnRow.finish_reason, TurnRow.state)
        statement = (
            select(*kinds, func.count().label("turns"))
            .join(recent, recent.c.id == TurnRow.session_id)
            .group_by(*kinds)
        )
        return self._all(statement)

    def newest_turn(self, number: int) -> str | None:
        """The id of the turn, of any run, that so many began after; None where there are not so many."""
        statement = select(TurnRow.id).order_by(TurnRow.id.desc()).offset(number).limit(1)
        return self._connection.execute(statement).scalar_one_or_none()

    def output_rate(self, run_id: str, *, begun: str, since: float, origin: float, width: float) -> dict[int, int]:
        """Output tokens of the turns finished since `since`, by bucket of `width` seconds after `origin`.

        Goes through those from the id `begun` on: ids are in the order in which turns began.
        """
        # Of whole numbers, which both databases divide alike: PostgreSQL rounds a fraction that is cast to one.
        milliseconds = cast((TurnRow.finished_at - origin) * 1000, BigInteger)
        bucket = milliseconds // cast(round(width * 1000), BigInteger)
        statement = (
            select(bucket, func.sum(func.length(TurnRow.output_logprobs)))
            .where(TurnRow.id >= begun, unindexed(TurnRow.run_id) == run_id, TurnRow.finished_at >= since)
            .group_by(bucket)
        )
        return {int(number): int(size) // _LOGPROB_BYTES for number, size in self._all(statement)}

    def trainer_marks(self, run_id: str) -> AnyRow | None:
        """The claim whose lease reaches furthest: `state`, `created_at`, `lease_expires_at`."""
        newest = [
            select(ClaimRow.state, ClaimRow.created_at, ClaimRow.lease_expires_at)
            .where(ClaimRow.run_id == run_id, ClaimRow.state == state.value)
            .order_by(ClaimRow.lease_expires_at.desc())
            .limit(1)
            .subquery()
            .select()
            for state in ClaimState
        ]
        marks = union_all(*newest).subquery()
        statement = select(marks).order_by(marks.c.lease_expires_at.desc()).limit(1)
        return self._connection.execute(statement).first()

    def oldest_ready(self, run_id: str) -> float | None:
        """Since when the longest waiting trajectory has been claimable."""
        statement = select(func.min(SessionRow.ready_at)).where(
            SessionRow.run_id == run_id, SessionRow.training == TrainingState.READY.value
        )
        return self._connection.execute(statement).scalar_one()

    # Curves

    def reward_buckets(self, run_id: str, stride: int) -> Sequence[AnyRow]:
        """`sessions`, `at`, `total` of every `stride` rewarded training sessions in order of their end. Walks all
        sessions of the run."""
        number = func.row_number().over(order_by=(SessionRow.ended_at, SessionRow.id)) - 1
        numbered = (
            select(SessionRow.ended_at, SessionRow.reward, number.label("number"))
            .where(
                SessionRow.run_id == run_id,
                SessionRow.ended_at.is_not(None),
                SessionRow.reward.is_not(None),
                SessionRow.purpose == Purpose.TRAIN.value,
            )
            .subquery()
        )
        # Both sides are integers: SQLite and Postgres then divide to an integer; `//` says so to SQLAlchemy.
        bucket = numbered.c.number // stride
        statement = (
            select(
                func.count().label("sessions"),
                func.max(numbered.c.ended_at).label("at"),
                func.sum(numbered.c.reward).label("total"),
            )
            .group_by(bucket)
            .order_by(bucket)
        )
        return self._all(statement)

    # Sessions

    def sessions(self, run_id: str, wanted: SessionFilter, *, after: Cursor | None, limit: int) -> Sequence[AnyRow]:
        """Return sessions newest first, below the cursor. A search without an index ends at `searched_to`."""
        by_time: ColumnElement[float] = SessionRow.created_at.expression
        if wanted.is_searched:
            searched = _newest(run_id, after, _SEARCHED_COLUMNS).limit(SEARCHED).subquery()
            found = select(searched.c.id).where(*_matching(wanted, searched.c))
            found = found.order_by(searched.c.created_at.desc(), searched.c.id.desc()).limit(limit)
            statement = _SESSIONS.where(SessionRow.id.in_(found.subquery().select()))
            return self._all(statement.order_by(by_time.desc(), SessionRow.id.desc()))
        # A group is smaller than its run. A name's index begins with the run.
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
            # Those that their own index finds are sorted: in the order of another, SQLite would go through all.
            by_time = unindexed(SessionRow.created_at)
        statement = _SESSIONS.where(*conditions).order_by(by_time.desc(), SessionRow.id.desc())
        return self._all(statement.limit(limit))

    def searched_to(self, run_id: str, after: Cursor | None) -> AnyRow | None:
        """The last of the sessions that one search goes through (`id`, `created_at`), None where it comes to the
        end."""
        statement = (
            _newest(run_id, after, (SessionRow.id.expression, SessionRow.created_at.expression))
            .offset(SEARCHED - 1)
            .limit(2)
        )
        rows = self._all(statement)
        return rows[0] if len(rows) == 2 else None

    def session(self, session_id: str) -> AnyRow | None:
        return self._connection.execute(_SESSIONS.where(SessionRow.id == session_id)).one_or_none()

    def rewards_of(self, session_ids: Sequence[str]) -> Sequence[AnyRow]:
        """In order of arrival."""
        if not session_ids:
            return ()
        statement = select(RewardRow.__table__).where(RewardRow.session_id.in_(session_ids))
        return self._all(statement.order_by(RewardRow.sequence))

    def trainings_of(self, session_ids: Sequence[str]) -> Sequence[AnyRow]:
        """The committed claims that handed these sessions out: `session_id`, `claim_id`, `reward`, `reward_ids`,
        `version`."""
        if not session_ids:
            return ()
        return self._all(_TRAININGS.where(ClaimedSessionRow.session_id.in_(session_ids)))

    # Turns

    def turns_of(self, session_id: str) -> Sequence[AnyRow]:
        return self._all(_TURNS.where(TurnRow.session_id == session_id).order_by(TurnRow.ordinal, TurnRow.id))

    def turn(self, turn_id: str) -> AnyRow | None:
        return self._connection.execute(_TURNS.where(TurnRow.id == turn_id)).one_or_none()

    # Versions

    def versions(self, run_id: str, *, below: int | None, limit: int) -> Sequence[AnyRow]:
        """Newest first, without what is said of each trajectory."""
        statement = select(*_STEP_COLUMNS).where(PolicyVersionRow.run_id == run_id)
        if below is not None:
            statement = statement.where(PolicyVersionRow.version < below)
        return self._all(statement.order_by(PolicyVersionRow.version.desc()).limit(limit))

    def version(self, run_id: str, version: int) -> AnyRow | None:
        statement = select(PolicyVersionRow.__table__).where(
            PolicyVersionRow.run_id == run_id, PolicyVersionRow.version == version
        )
        return self._connection.execute(statement).one_or_none()

    def last_steps(self) -> Sequence[AnyRow]:
        """`name` of each run that has a step, with `version`, `created_at` and `metrics` of its newest."""
        statement = select(
            RunRow.name, PolicyVersionRow.version, PolicyVersionRow.created_at, PolicyVersionRow.metrics
        ).where(
            PolicyVersionRow.run_id == RunRow.id,
            PolicyVersionRow.version == RunRow.head_version,
            PolicyVersionRow.version > 0,
        )
        return self._all(statement)

    def mismatch(self, run_id: str, head: int) -> float | None:
        """Return the difference between engine and trainer that the step of the head warned of; None: it did not."""
        statement = select(PolicyVersionRow.metrics).where(
            PolicyVersionRow.run_id == run_id, PolicyVersionRow.version == head
        )
        metrics = self._connection.execute(statement).scalar_one_or_none()
        return None if not metrics else metrics.get("mismatch_warning")

    def version_times(self, run_id: str, limit: int) -> Sequence[AnyRow]:
        """`version`, `created_at`, `served_at`, `swap_seconds` of the newest, newest first."""
        statement = select(
            PolicyVersionRow.version,
            PolicyVersionRow.created_at,
            PolicyVersionRow.served_at,
            PolicyVersionRow.swap_seconds,
        ).where(PolicyVersionRow.run_id == run_id)
        return self._all(statement.order_by(PolicyVersionRow.version.desc()).limit(limit))

    def learning_rates(self, run_id: str, limit: int) -> list[float]:
        """Learning rates of the newest versions, newest first, without those that no gradient made."""
        statement = (
            select(PolicyVersionRow.metrics)
            .where(PolicyVersionRow.run_id == run_id, PolicyVersionRow.version > 0)
            .order_by(PolicyVersionRow.version.desc())
            .limit(limit)
        )
        rates = [metrics.get("learning_rate") for (metrics,) in self._all(statement)]
        return [rate for rate in rates if rate is not None]

    def audits(self, run_id: str, versions: Sequence[int]) -> dict[int, str]:
        """Return the audits by version, as stored JSON."""
        statement = select(PolicyVersionRow.version, cast(PolicyVersionRow.audit, Text).label("audit")).where(
            PolicyVersionRow.run_id == run_id, PolicyVersionRow.version.in_(versions)
        )
        return {row.version: row.audit for row in self._all(statement)}

    def swap_counts(self) -> dict[str, int]:
        """Count swaps by run; runs without swaps are omitted."""
        statement = (
            select(PolicyVersionRow.run_id, func.count().label("swaps"))
            .where(PolicyVersionRow.version > 0, PolicyVersionRow.served_at.is_not(None))
            .group_by(PolicyVersionRow.run_id)
        )
        return {row.run_id: row.swaps for row in self._all(statement)}

    # Events and keys

    def events(self, run_id: str, *, after: int, limit: int) -> Sequence[AnyRow]:
        """The newest `limit` of those beyond `after`, newest first."""
        statement = (
            select(EventRow.__table__)
            .where(EventRow.run_id == run_id, EventRow.id > after)
            .order_by(EventRow.id.desc())
            .limit(limit)
        )
        return self._all(statement)


def _newest(run_id: str, after: Cursor | None, columns: Iterable[ColumnElement[Any]]) -> Select[*tuple[Any, ...]]:
    """A run's sessions below the cursor, newest first."""
    statement = select(*columns).where(SessionRow.run_id == run_id)
    if after is not None:
        statement = statement.where(_below(after))
    return statement.order_by(SessionRow.created_at.desc(), SessionRow.id.desc())


def _matching(wanted: SessionFilter, columns: _Columns) -> list[ColumnElement[bool]]:
    """What a session's own columns decide, but for being open."""
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

_STEP_COLUMNS = [
    column
    for column in PolicyVersionRow.__table__.c
    if column.name not in ("audit", "inputs", "weights_files", "engine_deaths")
]

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
