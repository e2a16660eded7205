"""What a trainer gets for a lease: whole trajectories, with their rewards as of the claim.

Turns are read beside the transaction that leases them: they never change, and which ones belong is written down.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from proxy.contract.claim import ClaimedBatch
from proxy.contract.identifiers import ClaimId, GroupId, SessionId
from proxy.contract.trajectory import Trajectory, TrajectoryGroup
from proxy.database.combining import SessionRewards
from proxy.trajectories.assembly import BrokenTree, StoredTurn, assemble
from proxy.trajectories.claims.selection import Candidate


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """A claim as committed, before its turns are read."""

    claim_id: ClaimId
    expires_at: float
    base_version: int
    units: list[tuple[Candidate, ...]]
    rewards: dict[str, SessionRewards]

    @property
    def turn_counts(self) -> dict[str, int]:
        return {candidate.id: candidate.turn_count for unit in self.units for candidate in unit}


def hand_out(lease: Lease, turns: Mapping[str, Sequence[StoredTurn]]) -> tuple[ClaimedBatch, list[str]]:
    """The batch, and the sessions left out of it because there is nothing to train in them."""
    groups: list[TrajectoryGroup] = []
    untrainable: list[str] = []
    for unit in lease.units:
        trajectories: list[Trajectory] = []
        for candidate in unit:
            trajectory = _trajectory(candidate, turns[candidate.id], lease.rewards[candidate.id])
            if trajectory is None:
                untrainable.append(candidate.id)
            else:
                trajectories.append(trajectory)
        if trajectories:
            groups.append(TrajectoryGroup(id=trajectories[0].group_id, trajectories=tuple(trajectories)))
    batch = ClaimedBatch(
        claim_id=lease.claim_id,
        lease_expires_at=lease.expires_at,
        base_version=lease.base_version,
        groups=tuple(groups),
    )
    return batch, untrainable


def nothing(*, base_version: int, now: float) -> ClaimedBatch:
    return ClaimedBatch(claim_id=None, lease_expires_at=now, base_version=base_version, groups=())


def _trajectory(candidate: Candidate, turns: Sequence[StoredTurn], rewards: SessionRewards) -> Trajectory | None:
    """None where nothing can be trained: no turn drawn from the policy, or turns that do not fit together."""
    try:
        trajectory = assemble(
            turns,
            session_id=SessionId(candidate.id),
            group_id=None if candidate.group_id is None else GroupId(candidate.group_id),
            task=candidate.task,
            reward=rewards.reward,
            turn_rewards=rewards.turn_rewards,
        )
    except BrokenTree:
        return None
    return trajectory if any(turn.trainable for turn in trajectory.turns) else None
