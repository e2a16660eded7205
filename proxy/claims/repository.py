"""Rows of claims, and the changes that claims make to sessions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast as cast_to

import msgspec
from sqlalchemy import (
    Connection,
    Table,
    Text,
    and_,
    bindparam,
    case,
    cast,
    delete,
    func,
    insert,
    literal_column,
    null,
    or_,
    select,
    text,
    update,
)

from proxy.claims.selection import Candidate, GroupStanding
from proxy.contract.claim import ClaimRequest
from proxy.contract.identifiers import ClaimId, RunId
from proxy.contract.policy import VersionState
from proxy.contract.reward import RewardRules
from proxy.contract.states import ClaimState, RunState, TrainingState
from proxy.database.prepared import NewRows, Prepared, among, unindexed
from proxy.database.rows import AnyRow
from proxy.database.tables import ClaimedSessionRow, ClaimRow, GroupRow, PolicyVersionRow, RunRow, SessionRow
from proxy.lifecycle.combining import SessionRewards
from proxy.lifecycle.lifecycle import reward_rules_in, settle, trains_passed_only


class RunStanding(msgspec.Struct, frozen=True, kw_only=True):
    """The columns of a run that a claim depends on. `is_active`: the run is, and its trainer need not wait until the
    head has passed its gates."""

    is_active: bool
    head_version: int
    reward_rules: RewardRules


class ClaimRepository:
    """Reads and writes within one transaction."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def run(self, run_id: str, *, lock: bool = False) -> RunStanding:
        """Return the run's standing. With `lock`, no other transaction claims or commits in this run until this one
        ends."""
        ((state, head_version, config, head_state),) = (_RUN_LOCKED if lock else _RUN).run(
            self._connection, {"of": run_id}
        )
        return RunStanding(
            is_active=state == RunState.ACTIVE and not (head_state in _UNDECIDED and trains_passed_only(config)),
            head_version=head_version,
            reward_rules=reward_rules_in(config),
        )

    def commit_without_flush(self) -> None:
        """Let this transaction commit on PostgreSQL without waiting for the disk.

        If the server is killed at that moment, the transaction is lost. Use it only for changes of leases.
        """
        # A lost lease does no harm: its sessions are ready again, and the trainer is refused and claims anew. A later
        # flushed commit, such as a training step's or a reward's, also flushes everything written before it.
        if self._connection.dialect.name == "postgresql":
            _NO_WAIT.run(self._connection, {})

    def ready_count(self, run_id: str, limit: int) -> int:
        """Return the number of ready sessions, `limit` at most."""
        ((count,),) = _READY_COUNT.run(self._connection, {"run": run_id, "limit": limit})
        return int(count)

    def ready_page(self, run_id: str, after: Candidate | None, limit: int) -> list[Candidate]:
        """Return up to `limit` ready sessions after `after`, first ready first."""
        values = {"run": run_id, "limit": limit}
        if after is None:
            rows = _FIRST_PAGE.run(self._connection, values)
        else:
            rows = _NEXT_PAGE.run(self._connection, {**values, "ready_at": after.ready_at, "after": after.id})
        return [Candidate(*row) for row in rows]

    def groups(self, group_ids: Sequence[str]) -> dict[str, GroupStanding]:
        if not group_ids:
            return {}
        ready: dict[str, list[Candidate]] = {group_id: [] for group_id in group_ids}
        for row in _READY_MEMBERS.run(self._connection, {"ids": group_ids}):
            candidate = Candidate(*row)
            ready[str(candidate.group_id)].append(candidate)
        rows = _GROUPS.run(self._connection, {"ids": group_ids})
        return {
            group_id: GroupStanding(size, members, pending, first_ended_at, tuple(ready[group_id]))
            for group_id, size, members, pending, first_ended_at in rows
        }

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
        row = {
            "id": claim_id,
            "run_id": run_id,
            "trainer": request.trainer,
            "process": request.process,
            "state": ClaimState.LEASED.value,
            "base_version": standing.head_version,
            "created_at": now,
            "lease_expires_at": lease_expires_at,
            "reward_rules": msgspec.to_builtins(standing.reward_rules),
        }
        _INSERT_CLAIM.run(self._connection, row)

    def lease(self, claim_id: ClaimId, candidates: Sequence[Candidate]) -> bool:
        """Move ready sessions into the claim. Return False if one is not ready any more or has changed since it was
        selected; the caller must then roll back.

        Rewards that arrive from now on are late.
        """
        session_ids = [candidate.id for candidate in candidates]
        leased = _LEASE.run(self._connection, {"claim": claim_id, "ids": session_ids})
        selected = {(one.id, one.turn_count, one.oldest_version) for one in candidates}
        return selected == {tuple(row) for row in leased}

    def hand_out(
        self, claim_id: ClaimId, candidates: Sequence[Candidate], rewards: Mapping[str, SessionRewards]
    ) -> None:
        """Record the sessions of the claim, with their rewards."""
        rows = [
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
        ]
        _LINEAGE.add(self._connection, rows)

    def mark_stale(self, session_ids: Sequence[str]) -> None:
        _MARK.run(self._connection, {"training_state": TrainingState.STALE.value, "ids": session_ids})

    def exclude(self, claim_id: ClaimId, session_ids: Sequence[str]) -> None:
        """Remove sessions without a trainable turn from the claim, and exclude them from training."""
        _EXCLUDE.run(self._connection, {"claim": claim_id, "ids": session_ids})
        _UNLIST.run(self._connection, {"claim": claim_id, "ids": session_ids})

    def state(self, claim_id: str, run_id: str) -> tuple[ClaimState, float] | None:
        """Return a claim's state and the end of its lease, and lock the claim; None if the run has no such claim."""
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
        """Return the leased claims of a trainer's process, and lock them."""
        statement = (
            select(ClaimRow.id)
            .where(ClaimRow.run_id == run_id, ClaimRow.process == process, ClaimRow.state == ClaimState.LEASED.value)
            .order_by(ClaimRow.created_at, ClaimRow.id)
            .with_for_update(key_share=True)
        )
        return [ClaimId(claim_id) for claim_id in self._connection.execute(statement).scalars()]

    def listed(self, run_id: str, limit: int) -> list[tuple[AnyRow, int]]:
        """Return claims with their numbers of sessions: leased ones first, then the others, each newest first."""
        # Ids are in the order of time, so the primary key finds the newest without a sort of all claims.
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

    def overdue(self, now: float, limit: int) -> list[tuple[ClaimId, RunId]]:
        """Return up to `limit` claims whose lease has passed, with their runs."""
        rows = _OVERDUE.run(self._connection, {"now": now, "limit": limit})
        return [(ClaimId(claim_id), RunId(run_id)) for claim_id, run_id in rows]

    def end(self, claim_id: str, state: ClaimState, *, now: float) -> int:
        """End a leased claim without a commit and return the number of its sessions, which are ready again.

        Rewards that arrived during the lease count from now on.
        """
        self._connection.execute(update(ClaimRow).where(ClaimRow.id == claim_id).values(state=state.value))
        leased = SessionRow.training == TrainingState.LEASED.value
        returned = update(SessionRow).where(SessionRow.claim_id == claim_id, leased)
        returned = returned.values(training=TrainingState.READY.value, claim_id=None)
        session_ids = list(self._connection.execute(returned.returning(SessionRow.id)).scalars())
        settle(self._connection, session_ids, now=now)
        return len(session_ids)


_NO_WAIT = Prepared(text("SET LOCAL synchronous_commit = off"))

_UNDECIDED = (VersionState.CANDIDATE.value, VersionState.CANARY.value)

_RUN_STANDING = select(
    RunRow.state,
    RunRow.head_version,
    cast(RunRow.config, Text),
    # A subquery, because a join would lock the version's row as well.
    select(PolicyVersionRow.state)
    .where(PolicyVersionRow.run_id == RunRow.id, PolicyVersionRow.version == RunRow.head_version)
    .scalar_subquery(),
).where(RunRow.id == bindparam("of"))

_RUN = Prepared(_RUN_STANDING)

# FOR NO KEY UPDATE: sessions and claims that refer to the run can still be inserted.
_RUN_LOCKED = Prepared(_RUN_STANDING.with_for_update(key_share=True))

# A literal: PostgreSQL then plans by the share of sessions that are ready, which a parameter would hide.
_IS_READY = SessionRow.run_id == bindparam("run"), SessionRow.training == literal_column("'ready'")

_READY_COUNT = Prepared(
    select(func.count()).select_from(select(SessionRow.id).where(*_IS_READY).limit(bindparam("limit")).subquery())
)

_OVERDUE = Prepared(
    select(ClaimRow.id, ClaimRow.run_id)
    .where(ClaimRow.state == ClaimState.LEASED.value, ClaimRow.lease_expires_at <= bindparam("now"))
    .order_by(ClaimRow.lease_expires_at)
    .limit(bindparam("limit"))
)

_INSERT_CLAIM = Prepared(
    insert(ClaimRow),
    columns=(
        "id",
        "run_id",
        "trainer",
        "process",
        "state",
        "base_version",
        "created_at",
        "lease_expires_at",
        "reward_rules",
    ),
)

_CANDIDATES = select(*(getattr(SessionRow, name) for name in Candidate._fields))

_FIRST_PAGE = Prepared(
    _CANDIDATES.where(*_IS_READY).order_by(SessionRow.ready_at, SessionRow.id).limit(bindparam("limit"))
)

_NEXT_PAGE = Prepared(
    _CANDIDATES.where(
        *_IS_READY,
        SessionRow.ready_at >= bindparam("ready_at"),
        or_(
            SessionRow.ready_at > bindparam("ready_at"),
            and_(SessionRow.ready_at == bindparam("ready_at"), SessionRow.id > bindparam("after")),
        ),
    )
    .order_by(SessionRow.ready_at, SessionRow.id)
    .limit(bindparam("limit"))
)

_READY_MEMBERS = Prepared(
    _CANDIDATES.where(among(SessionRow.group_id, "ids"), SessionRow.training == TrainingState.READY.value).order_by(
        SessionRow.ready_at, SessionRow.id
    )
)

_GROUPS = Prepared(
    select(
        GroupRow.id,
        GroupRow.size,
        func.count(),
        func.sum(case((SessionRow.training == TrainingState.PENDING.value, 1), else_=0)),
        func.min(SessionRow.ended_at),
    )
    .join(SessionRow, SessionRow.group_id == GroupRow.id)
    .where(among(GroupRow.id, "ids"))
    .group_by(GroupRow.id, GroupRow.size)
)

# Whoever updates first has a session: the condition on the state makes a second claim of it update nothing.
_READY_AMONG = among(SessionRow.id, "ids"), unindexed(SessionRow.training) == TrainingState.READY.value

_LEASE = Prepared(
    update(SessionRow)
    .where(*_READY_AMONG)
    .values(training=TrainingState.LEASED.value, claim_id=bindparam("claim"))
    .returning(SessionRow.id, SessionRow.turn_count, SessionRow.oldest_version)
)

_LINEAGE = NewRows(cast_to("Table", ClaimedSessionRow.__table__))

_MARK = Prepared(update(SessionRow).where(*_READY_AMONG).values(training=bindparam("training_state")))

_EXCLUDE = Prepared(
    update(SessionRow)
    .where(
        among(SessionRow.id, "ids"),
        unindexed(SessionRow.claim_id) == bindparam("claim"),
        unindexed(SessionRow.training) == TrainingState.LEASED.value,
    )
    .values(training=TrainingState.EXCLUDED.value, claim_id=null())
)

_UNLIST = Prepared(
    delete(ClaimedSessionRow).where(
        ClaimedSessionRow.claim_id == bindparam("claim"), among(ClaimedSessionRow.session_id, "ids")
    )
)
