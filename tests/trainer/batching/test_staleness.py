from __future__ import annotations

import msgspec
import pytest

from proxy.contract.claim import SkipReason
from proxy.contract.trajectory import Trajectory
from proxy.contract.turn import VersionSpan
from tests.trainer.tiny import group_of, trajectory, turn
from trainer.batching.grouping import flatten
from trainer.batching.staleness import drop_unusable, unusable


@pytest.mark.parametrize(("version", "dropped"), [(10, False), (6, False), (5, True)])
def test_staleness_counts_from_the_oldest_token(version: int, dropped: bool) -> None:
    node = turn([4, 5], version=10)
    spans = (VersionSpan(version=version, start=0, end=1), VersionSpan(version=10, start=1, end=2))
    tree = trajectory(msgspec.structs.replace(node, spans=spans))
    assert (unusable(tree, 10, 4, 64) is SkipReason.STALE) is dropped


@pytest.mark.parametrize(
    "tree",
    [
        trajectory(turn([64])),
        trajectory(turn([4], prompt=[-1])),
        trajectory(turn([4], prompt=[])),
        trajectory(turn([4], logprobs=[float("nan")])),
        trajectory(turn([4], logprobs=[-1.0, -1.0])),
        trajectory(turn([4], parent=0, prefix=2)),
        trajectory(turn([4]), turn([5], parent=0, prefix=5)),
        trajectory(turn([4]), reward=float("inf")),
        trajectory(msgspec.structs.replace(turn([4, 5]), spans=(VersionSpan(version=0, start=0, end=1),))),
    ],
)
def test_inconsistent_trajectories_are_not_trained(tree: Trajectory) -> None:
    assert unusable(tree, 0, 4, 64) is SkipReason.MALFORMED


def test_rewards_of_turns_count_as_rewards() -> None:
    assert unusable(trajectory(turn([4]), reward=None), 0, 4, 64) is SkipReason.NO_REWARD
    assert unusable(trajectory(turn([4], reward=0.0), reward=None), 0, 4, 64) is None


def test_greedy_turns_are_not_trained() -> None:
    assert unusable(trajectory(turn([4], temperature=0.0)), 0, 4, 64) is SkipReason.NOTHING_TRAINABLE


def test_dropped_trajectories_are_named_and_the_rest_keep_their_groups() -> None:
    usable = [trajectory(turn([4])) for _ in range(3)]
    groups = [group_of([usable[0], trajectory(turn([99])), usable[1]]), group_of([usable[2]], None)]
    batch, dropped = drop_unusable(flatten(groups, 0), 4, 64)
    assert batch.trajectories == tuple(usable)
    assert batch.groups == (0, 0, 1)
    assert dropped == {1: SkipReason.MALFORMED}


def test_trajectories_without_a_group_have_no_cohort() -> None:
    ungrouped = group_of([trajectory(turn([4])) for _ in range(3)], None)
    together = group_of([trajectory(turn([4])) for _ in range(2)], "a")
    assert flatten([ungrouped, together, together], 7).groups == (0, 1, 2, 3, 3, 4, 4)
