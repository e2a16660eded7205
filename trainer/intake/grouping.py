"""A claimed batch as one flat list of trajectories, each with the index of its group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from proxy.contract.trajectory import Trajectory, TrajectoryGroup


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """`groups[i]` is equal for trajectories that attempt one task. `base_version` is the version trained from."""

    trajectories: tuple[Trajectory, ...]
    groups: tuple[int, ...]
    base_version: int


def flatten(groups: Sequence[TrajectoryGroup], base_version: int) -> Batch:
    """Members of a group share an index; every trajectory of a group without an id is a group of its own."""
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
