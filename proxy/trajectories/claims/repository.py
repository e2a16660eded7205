"""Rows of claims, and of the sessions as claims move them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Any

import msgspec
from sqlalchemy import Connection, Row, Text, and_, bindparam, case, cast, delete, func, insert, or_, select, update

from proxy.contract.claim import ClaimRequest
from proxy.contract.identifiers import ClaimId, RunId
from proxy.contract.reward import RewardRules
from proxy.database.combining import SessionRewards
from proxy.database.lifecycle import TrainingState, reward_rules_in, settle
from proxy.database.tables import ClaimedSessionRow, ClaimRow, GroupRow, RunRow, SessionRow
from proxy.trajectories.claims.selection import Candidate, GroupStanding

_CHUNK = 500
_ACTIVE = "active"


class ClaimState(StrEnum):
    LEASED = "leased"
    COMMITTED = "committed"
    RELEASED = "released"
    EXPIRED = "expired"


class RunStanding(msgspec.Struct, frozen=True, kw_only=True):
    """What a claim must know of its run."""

    is_active: bool
    head_version: int
    reward_rules: RewardRules


class ClaimRepository:
    """Reads and writes of one transaction."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def run(self, run_id: str, *, lock: bool = False) -> RunStanding:
        """With `lock`, nobody else claims or commits in this run until the transaction's end."""
        config = cast(RunRow.config, Text).label("config")
        statement = select(RunRow.state, RunRow.head_version, config).where(RunRow.id == run_id)
        row = self._connection.execute(statement.with_for_update(key_share=True) if lock else statement).one()
        return RunStanding(
            is_active=row.state == _ACTIVE,
            head_version=row.head_version,
            reward_rules=reward_rules_in(row.config),
        )

    def ready_count(self, run_id: str, limit: int) -> int:
        """How many sessions are ready, counted up to `limit`."""
        ready = select(SessionRow.id).where(*_is_ready(run_id)).limit(limit).subquery()
        return int(self._connection.execute(select(func.count()).select_from(ready)).scalar_one())

    def ready_page(self, run_id: str, after: Candidate | None, limit: int) -> list[Candidate]:
        """Ready sessions, first ready first, that come after `after`."""
        statement = _CANDIDATES.where(*_is_ready(run_id)).order_by(SessionRow.ready_at, SessionRow.id).limit(limit)
        if after is not None:
            later = or_(
                SessionRow.ready_at > after.ready_at,
                and_(SessionRow.ready_at == after.ready_at, SessionRow.id > after.id),
            )
            statement = statement.where(SessionRow.ready_at >= after.ready_at, later)
        return [_candidate(row) for row in self._connection.execute(statement)]

    def groups(self, group_ids: Sequence[str]) -> dict[str, GroupStanding]:
        ready: dict[str, list[Candidate]] = {group_id: [] for group_id in group_ids}
        standings: dict[str, GroupStanding] = {}
        for part in _chunks(group_ids):
            for row in self._connection.execute(_READY_MEMBERS, {"ids": part}):
                ready[row.group_id].append(_candidate(row))
            for row in self._connection.execute(_GROUPS, {"ids": part}):
                standings[row.id] = GroupStanding(
                    size=row.size,
                    members=row.members,
                    pending=row.pending,
                    first_ended_at=row.first_ended_at,
                    ready=tuple(ready[row.id]),
                )
        return standings

    def insert_claim(
        self,
        claim_id: ClaimId,
        run_id: RunId,
        request: ClaimRequest,
        *,
        standing: RunStanding,
        now: float,
        lease_expires_at: float,
    ) -> None:
        self._connection.execute(
            insert(ClaimRow).values(
                id=claim_id,
                run_id=run_id,
                trainer=request.trainer,
                process=request.process,
                state=ClaimState.LEASED.value,
                base_version=standing.head_version,
                created_at=now,
                lease_expires_at=lease_expires_at,
                reward_rules=msgspec.to_builtins(standing.reward_rules),
            )
        )

    def lease(self, claim_id: ClaimId, session_ids: Sequence[str]) -> int:
        """Moves ready sessions into the claim; how many still were ready. Rewards that come from here on are late."""
        leased = 0
        for part in _chunks(session_ids):
            leased += self._connection.execute(_LEASE, {"claim": claim_id, "ids": part}).rowcount
        return leased

    def hand_out(
        self, claim_id: ClaimId, candidates: Sequence[Candidate], rewards: Mapping[str, SessionRewards]
    ) -> None:
        """Writes down what the claim consists of."""
        self._connection.execute(
            insert(ClaimedSessionRow),
            [
                {
                    "claim_id": claim_id,
                    "session_id": candidate.id,
                    "position": position,
                    "reward": rewards[candidate.id].reward,
                    "reward_ids": list(rewards[candidate.id].reward_ids),
                    "turn_rewards": rewards[candidate.id].turn_rewards,
                    "turn_count": candidate.turn_count,
                }
                for position, candidate in enumerate(candidates)
            ],
        )

    def mark_stale(self, session_ids: Sequence[str]) -> None:
        for part in _chunks(session_ids):
            self._connection.execute(_MARK, {"training_state": TrainingState.STALE.value, "ids": part})

    def exclude(self, claim_id: ClaimId, session_ids: Sequence[str]) -> None:
        """Takes sessions that were never handed out of the claim, for good."""
        for part in _chunks(session_ids):
            self._connection.execute(_EXCLUDE, {"claim": claim_id, "ids": part})
            self._connection.execute(_UNLIST, {"claim": claim_id, "ids": part})

    def state(self, claim_id: str, run_id: str) -> tuple[ClaimState, float] | None:
        """A claim's state and the end of its lease."""
        statement = select(ClaimRow.state, ClaimRow.lease_expires_at).where(
            ClaimRow.id == claim_id, ClaimRow.run_id == run_id
        )
        row = self._connection.execute(statement.with_for_update(key_share=True)).one_or_none()
        return None if row is None else (ClaimState(row.state), row.lease_expires_at)

    def extend(self, claim_id: str, lease_expires_at: float) -> None:
        self._connection.execute(
            update(ClaimRow).where(ClaimRow.id == claim_id).values(lease_expires_at=lease_expires_at)
        )

    def of_process(self, run_id: str, process: str) -> list[ClaimId]:
        """The claims that a trainer's process holds."""
        statement = (
            select(ClaimRow.id)
            .where(ClaimRow.run_id == run_id, ClaimRow.process == process, ClaimRow.state == ClaimState.LEASED.value)
            .order_by(ClaimRow.created_at, ClaimRow.id)
            .with_for_update(key_share=True)
        )
        return [ClaimId(claim_id) for claim_id in self._connection.execute(statement).scalars()]

    def listed(self, run_id: str, limit: int) -> list[tuple[Row[*tuple[Any, ...]], int]]:
        """Those that are leased, then the others, newest first each; with how many sessions they handed out.

        Ids follow the time, so that the newest are found without a look at all.
        """
        of_run = select(ClaimRow.__table__).where(ClaimRow.run_id == run_id).order_by(ClaimRow.id.desc()).limit(limit)
        leased = ClaimRow.state == ClaimState.LEASED.value
        rows = list(self._connection.execute(of_run.where(leased)))
        rows += list(self._connection.execute(of_run.where(~leased)))
        rows = rows[:limit]
        counted = (
            select(ClaimedSessionRow.claim_id, func.count())
            .where(ClaimedSessionRow.claim_id.in_([row.id for row in rows]))
            .group_by(ClaimedSessionRow.claim_id)
        )
        sessions = {row[0]: int(row[1]) for row in self._connection.execute(counted)}
        return [(row, sessions.get(row.id, 0)) for row in rows]

    def overdue(self, now: float, limit: int) -> list[Row[*tuple[Any, ...]]]:
        """Claims whose lease has passed: their ids and runs."""
        statement = (
            select(ClaimRow.id, ClaimRow.run_id)
            .where(ClaimRow.state == ClaimState.LEASED.value, ClaimRow.lease_expires_at <= now)
            .order_by(ClaimRow.lease_expires_at)
            .limit(limit)
        )
        return list(self._connection.execute(statement).all())

    def end(self, claim_id: str, state: ClaimState, *, now: float) -> int:
        """Ends a leased claim without a commit; its sessions are ready again. How many.

        Rewards that came during the lease count from here on.
        """
        self._connection.execute(update(ClaimRow).where(ClaimRow.id == claim_id).values(state=state.value))
        leased = SessionRow.training == TrainingState.LEASED.value
        returned = update(SessionRow).where(SessionRow.claim_id == claim_id, leased)
        returned = returned.values(training=TrainingState.READY.value, claim_id=None)
        session_ids = list(self._connection.execute(returned.returning(SessionRow.id)).scalars())
        settle(self._connection, session_ids, now=now)
        return len(session_ids)


def _is_ready(run_id: str) -> tuple[Any, ...]:
    return SessionRow.run_id == run_id, SessionRow.training == TrainingState.READY.value


_CANDIDATES = select(
    SessionRow.id,
    SessionRow.group_id,
    SessionRow.task,
    SessionRow.ready_at,
    SessionRow.oldest_version,
    SessionRow.turn_count,
)

_READY_MEMBERS = _CANDIDATES.where(
    SessionRow.group_id.in_(bindparam("ids", expanding=True)), SessionRow.training == TrainingState.READY.value
).order_by(SessionRow.ready_at, SessionRow.id)

_GROUPS = (
    select(
        GroupRow.id,
        GroupRow.size,
        func.count().label("members"),
        func.sum(case((SessionRow.training == TrainingState.PENDING.value, 1), else_=0)).label("pending"),
        func.min(SessionRow.ended_at).label("first_ended_at"),
    )
    .join(SessionRow, SessionRow.group_id == GroupRow.id)
    .where(GroupRow.id.in_(bindparam("ids", expanding=True)))
    .group_by(GroupRow.id, GroupRow.size)
)

_READY_AMONG = (
    SessionRow.id.in_(bindparam("ids", expanding=True)),
    SessionRow.training == TrainingState.READY.value,
)

_LEASE = (
    update(SessionRow).where(*_READY_AMONG).values(training=TrainingState.LEASED.value, claim_id=bindparam("claim"))
)

_MARK = update(SessionRow).where(*_READY_AMONG).values(training=bindparam("training_state"))

_EXCLUDE = (
    update(SessionRow)
    .where(
        SessionRow.id.in_(bindparam("ids", expanding=True)),
        SessionRow.claim_id == bindparam("claim"),
        SessionRow.training == TrainingState.LEASED.value,
    )
    .values(training=TrainingState.EXCLUDED.value, claim_id=None)
)

_UNLIST = delete(ClaimedSessionRow).where(
    ClaimedSessionRow.claim_id == bindparam("claim"),
    ClaimedSessionRow.session_id.in_(bindparam("ids", expanding=True)),
)


def _candidate(row: Row[*tuple[Any, ...]]) -> Candidate:
    return Candidate(
        id=row.id,
        group_id=row.group_id,
        task=row.task,
        ready_at=row.ready_at,
        oldest_version=row.oldest_version,
        turn_count=row.turn_count,
    )


def _chunks(ids: Sequence[str]) -> Iterable[list[str]]:
    """Databases bound the number of parameters of a statement."""
    return (list(ids[start : start + _CHUNK]) for start in range(0, len(ids), _CHUNK))
