"""The batch of a claim: whole trajectories, with their rewards and texts as of the claim.

Turns are read and assembled while the lease is being committed: they never change, and the claim records how many
belong to it. Only rewards and texts must be read in the claim's transaction.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from proxy.claims.hints import HintMaker, contract_feedback
from proxy.claims.selection import Candidate
from proxy.contract.claim import ClaimedBatch
from proxy.contract.identifiers import ClaimId, GroupId, SessionId
from proxy.contract.trajectory import Trajectory, TrajectoryGroup, TrajectoryTurn
from proxy.lifecycle.combining import SessionRewards
from proxy.lifecycle.texts import FeedbackEntry
from proxy.turns.assembly import BrokenTree, StoredTurn, assemble


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """A committed claim without its turns. `expires_at` is in seconds since the epoch."""

    claim_id: ClaimId
    expires_at: float
    base_version: int
    units: list[tuple[Candidate, ...]]
    rewards: dict[str, SessionRewards]
    texts: dict[str, tuple[FeedbackEntry, ...]] = {}

    @property
    def candidates(self) -> list[Candidate]:
        return [candidate for unit in self.units for candidate in unit]


def assemble_candidates(
    candidates: Sequence[Candidate], turns: Mapping[str, Sequence[StoredTurn]]
) -> dict[str, Trajectory | None]:
    """Return trajectories without rewards, by session.

    None stands for a session with nothing to train: no trainable turn, or turns that do not form a tree.
    """
    return {candidate.id: _trajectory(candidate, turns[candidate.id]) for candidate in candidates}


def hand_out(
    lease: Lease, trajectories: Mapping[str, Trajectory | None], hint_maker: HintMaker | None = None
) -> tuple[ClaimedBatch, list[str]]:
    """Return the batch, and the sessions left out of it because they have nothing to train. Without a `hint_maker`,
    texts come without hints."""
    groups: list[TrajectoryGroup] = []
    untrainable: list[str] = []
    for unit in lease.units:
        found: list[Trajectory] = []
        for candidate in unit:
            trajectory = trajectories[candidate.id]
            if trajectory is None:
                untrainable.append(candidate.id)
            else:
                trajectory = _rewarded(trajectory, lease.rewards[candidate.id])
                found.append(_described(trajectory, lease.texts.get(candidate.id, ()), hint_maker))
        if found:
            groups.append(TrajectoryGroup(id=found[0].group_id, trajectories=tuple(found)))
    batch = ClaimedBatch(
        claim_id=lease.claim_id,
        lease_expires_at=lease.expires_at,
        base_version=lease.base_version,
        groups=tuple(groups),
    )
    return batch, untrainable


def empty_batch(*, base_version: int, now: float) -> ClaimedBatch:
    return ClaimedBatch(claim_id=None, lease_expires_at=now, base_version=base_version, groups=())


def _trajectory(candidate: Candidate, turns: Sequence[StoredTurn]) -> Trajectory | None:
    try:
        trajectory = assemble(
            turns,
            session_id=SessionId(candidate.id),
            group_id=None if candidate.group_id is None else GroupId(candidate.group_id),
            task=candidate.task,
            first_message=candidate.first_message,
            reward=None,
            turn_rewards={},
        )
    except BrokenTree:
        return None
    return trajectory if any(turn.trainable for turn in trajectory.turns) else None


def _rewarded(trajectory: Trajectory, rewards: SessionRewards) -> Trajectory:
    def with_reward(turn: TrajectoryTurn) -> TrajectoryTurn:
        reward = rewards.turn_rewards.get(turn.id)
        return turn if reward is None else msgspec.structs.replace(turn, reward=reward)

    turns = tuple([with_reward(turn) for turn in trajectory.turns]) if rewards.turn_rewards else trajectory.turns
    return msgspec.structs.replace(trajectory, reward=rewards.reward, turns=turns)


def _described(trajectory: Trajectory, entries: Sequence[FeedbackEntry], hint_maker: HintMaker | None) -> Trajectory:
    if not entries:
        return trajectory
    trajectory = msgspec.structs.replace(trajectory, feedback=contract_feedback(entries))
    return trajectory if hint_maker is None else hint_maker.with_hints(trajectory, entries)
