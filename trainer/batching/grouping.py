"""Join claims into one batch, and flatten a batch into trajectories with the indices of their groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from proxy.contract.claim import ClaimedBatch
from proxy.contract.trajectory import Trajectory, TrajectoryGroup


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """Trajectories for one step from `base_version`. `groups[i]` is equal for trajectories that attempt one task."""

    trajectories: tuple[Trajectory, ...]
    groups: tuple[int, ...]
    base_version: int

    def only(self, indices: Sequence[int]) -> Batch:
        """Return the batch with only the trajectories at these indices, in this order."""
        return Batch(
            trajectories=tuple(self.trajectories[index] for index in indices),
            groups=tuple(self.groups[index] for index in indices),
            base_version=self.base_version,
        )


def flatten(groups: Sequence[TrajectoryGroup], base_version: int) -> Batch:
    """Return the trajectories of the groups. Members of a group share an index; every trajectory of a group without
    an id is a group of its own."""
    trajectories: list[Trajectory] = []
    indices: list[int] = []
    index = -1
    for group in groups:
        for position, trajectory in enumerate(group.trajectories):
            if group.id is None or position == 0:
                index += 1
            trajectories.append(trajectory)
            indices.append(index)
    return Batch(trajectories=tuple(trajectories), groups=tuple(indices), base_version=base_version)


def joined(claims: Sequence[ClaimedBatch]) -> ClaimedBatch:
    """Join several claims into one batch with the id of the first, the earliest end of a lease and the newest state
    of the engine."""
    first, last = claims[0], claims[-1]
    return msgspec.structs.replace(
        first,
        groups=tuple(group for claim in claims for group in claim.groups),
        lease_expires_at=min(claim.lease_expires_at for claim in claims),
        engine=last.engine,
    )
