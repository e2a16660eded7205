"""Find the groups of a batch with a signal, and those whose differing rewards give none: pure functions.

A group has a signal if one of its trajectories has an advantage other than zero at one of its turns.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from proxy.contract.trajectory import Trajectory
from trainer.algorithm.advantages import session_rewards
from trainer.algorithm.parts import Algorithm


def with_signal(groups: Sequence[int], turns: Sequence[Sequence[float]]) -> list[int]:
    """Return the indices of the trajectories whose group has a signal. `groups` holds one index per trajectory, equal
    within a group; `turns[i]` are the advantages of trajectory i's turns."""
    found = {group for group, advantages in zip(groups, turns, strict=True) if any(advantages)}
    return [index for index, group in enumerate(groups) if group in found]


def levelled_groups(trajectories: Sequence[Trajectory], groups: Sequence[int], algorithm: Algorithm) -> int:
    """Count the groups whose given session rewards differ but become equal by the reward's bounds or the overlong
    penalty."""
    rewarded = [index for index, trajectory in enumerate(trajectories) if trajectory.reward is not None]
    shaped = session_rewards([trajectories[index] for index in rewarded], algorithm).tolist()
    given: dict[int, set[float]] = defaultdict(set)
    left: dict[int, set[float]] = defaultdict(set)
    for index, reward in zip(rewarded, shaped, strict=True):
        given[groups[index]].add(trajectories[index].reward or 0.0)
        left[groups[index]].add(reward)
    return sum(len(given[group]) > 1 and len(left[group]) == 1 for group in given)
