"""The batch of a committed step, rebuilt as its trainer received it.

The claim fixes what the trainer saw of a session: its first `turn_count` turns, which never change, and the rewards
recorded with the claim. Later turns, later rewards and changed reward rules have no effect.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
from sqlalchemy import Connection

from proxy.contract.claim import ClaimedBatch
from proxy.contract.identifiers import ClaimId, GroupId, RunId, SessionId, TurnId
from proxy.contract.policy import Head
from proxy.contract.replay import StepBatch
from proxy.contract.step import StepInputs
from proxy.contract.trajectory import Trajectory, TrajectoryGroup
from proxy.database.rows import AnyRow
from proxy.database.unit_of_work import Database
from proxy.errors import InvalidRequest, NotFound
from proxy.lifecycle.weights import weights_of
from proxy.runs.service import RunView
from proxy.steps.repository import StepRepository
from proxy.turns.assembly import BrokenTree, StoredTurn, assemble
from proxy.turns.repository import TurnRepository


class StepService:
    """Batches of the steps of all runs."""

    def __init__(self, *, database: Database) -> None:
        self._database = database

    async def batch(self, run: RunView, version: int) -> StepBatch:
        """Return the batch of the step that made `version`. Raise NotFound, and InvalidRequest for version 0, which
        no step of the run made."""
        if version == 0:
            raise InvalidRequest(
                "version 0 is what the run began from: no step of it made version 0", param="version"
            )
        return await self._database.read(lambda connection: _batch(connection, run.id, version))


def _batch(connection: Connection, run_id: RunId, version: int) -> StepBatch:
    repository = StepRepository(connection)
    run = repository.run(run_id)
    row = repository.version(run_id, version)
    parent = repository.version(run_id, row.parent_version) if row is not None else None
    weights = weights_of(row) if row is not None else None
    if row is None or parent is None or weights is None:
        raise NotFound(f"the run {run.name!r} has no version {version}")
    claims = repository.claims(row.claim_ids)
    handed_out = repository.handed_out(row.claim_ids)
    trajectories, missing = _trajectories(
        connection, [session for sessions in handed_out.values() for session in sessions]
    )
    return StepBatch(
        version=version,
        parent=Head(
            run_id=run_id,
            run_name=run.name,
            version=row.parent_version,
            base_model=run.base_model,
            weights=weights_of(parent),
        ),
        parent_removed=parent.weights_removed_at is not None,
        weights=weights,
        removed=row.weights_removed_at is not None,
        seed=row.seed,
        config_hash=row.config_hash,
        inputs=None if row.inputs is None else msgspec.convert(row.inputs, StepInputs),
        metrics=row.metrics,
        claims=tuple(
            ClaimedBatch(
                claim_id=ClaimId(claim_id),
                lease_expires_at=claims[claim_id].lease_expires_at,
                base_version=claims[claim_id].base_version,
                groups=_groups(handed_out[claim_id], trajectories),
            )
            for claim_id in row.claim_ids
        ),
        missing=missing,
    )


def _trajectories(
    connection: Connection, sessions: Sequence[AnyRow]
) -> tuple[dict[str, Trajectory], tuple[SessionId, ...]]:
    """Return the trajectories by session, and the sessions that lack something of what the trainer received."""
    counts = {session.session_id: session.turn_count for session in sessions}
    turns = TurnRepository(connection).turns_of(counts)
    lacking = StepRepository(connection).lacking_turns(counts)
    lacking |= {
        session.session_id
        for session in sessions
        # Claims older than the column `turn_rewards` did not record the rewards of turns.
        if session.erased_at is not None or session.turn_rewards is None
    }
    trajectories: dict[str, Trajectory] = {}
    for session in sessions:
        trajectory = _trajectory(session, turns[session.session_id])
        if trajectory is None:
            lacking.add(session.session_id)
        else:
            trajectories[session.session_id] = trajectory
    return trajectories, tuple(SessionId(session_id) for session_id in counts if session_id in lacking)


def _groups(sessions: Sequence[AnyRow], trajectories: Mapping[str, Trajectory]) -> tuple[TrajectoryGroup, ...]:
    # Members of a group follow each other in a claim.
    groups: list[list[Trajectory]] = []
    last: str | None = None
    for session in sessions:
        trajectory = trajectories.get(session.session_id)
        if trajectory is None:
            continue
        if groups and session.group_id is not None and session.group_id == last:
            groups[-1].append(trajectory)
        else:
            groups.append([trajectory])
        last = session.group_id
    return tuple(TrajectoryGroup(id=group[0].group_id, trajectories=tuple(group)) for group in groups)


def _trajectory(session: AnyRow, turns: Sequence[StoredTurn]) -> Trajectory | None:
    """Return the trajectory; None if the remaining turns do not form a tree."""
    try:
        return assemble(
            turns,
            session_id=SessionId(session.session_id),
            group_id=None if session.group_id is None else GroupId(session.group_id),
            task=session.task,
            first_message=session.first_message,
            reward=session.reward,
            turn_rewards={TurnId(turn_id): reward for turn_id, reward in (session.turn_rewards or {}).items()},
        )
    except BrokenTree:
        return None
