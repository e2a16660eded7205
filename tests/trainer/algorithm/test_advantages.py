from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.trainer.tiny import trajectory, turn
from trainer.algorithm.advantages import RunningMeans, assign, credit, discounts, shaped
from trainer.algorithm.baselines import RunningMean
from trainer.algorithm.presets import resolve
from trainer.config import AlgorithmSettings, RewardSettings

GRPO = resolve(AlgorithmSettings())
MEANS = RunningMeans.fresh(0.9)


@st.composite
def parents(draw: st.DrawFn) -> list[int | None]:
    size = draw(st.integers(1, 8))
    return [None if index == 0 else draw(st.none() | st.integers(0, index - 1)) for index in range(size)]


def leaf_distances(parents: list[int | None], start: int) -> list[int]:
    children = [index for index, parent in enumerate(parents) if parent == start]
    if not children:
        return [0]
    return [1 + distance for child in children for distance in leaf_distances(parents, child)]


@given(tree=parents(), discount=st.floats(0.1, 1.0))
def test_a_turn_is_discounted_by_its_distance_to_its_leaves(tree: list[int | None], discount: float) -> None:
    found = discounts(tree, discount)
    for index, value in enumerate(found):
        distances = leaf_distances(tree, index)
        assert value == pytest.approx(sum(discount**distance for distance in distances) / len(distances))
    assert discounts(tree, 1.0) == [1.0] * len(tree)


def test_parallel_branches_do_not_leak_into_each_other() -> None:
    rewarded = turn([5], parent=0, prefix=0, reward=1.0)
    tree = trajectory(turn([4]), rewarded, turn([6], parent=0, prefix=0), reward=None)
    assert credit(tree, 0.0, GRPO, RunningMean(decay=0.9)) == (0.0, 1.0, 0.0)


def test_turn_rewards_have_a_baseline_of_their_own() -> None:
    first = trajectory(turn([4], reward=1.0), reward=None)
    advantages = assign([first], [0], GRPO, MEANS)
    assert advantages.turns == ((1.0,),)
    assert (advantages.means.turn.value, advantages.means.session.value) == (1.0, None)
    again = assign([first], [0], GRPO, advantages.means)
    assert again.turns == ((0.0,),)
    assert again.all_zero


def test_groups_are_compared_within_themselves() -> None:
    batch = [trajectory(turn([4]), reward=reward) for reward in (1.0, 0.0, 5.0, 5.0)]
    advantages = assign(batch, [0, 0, 1, 1], GRPO, MEANS)
    assert advantages.session == pytest.approx((1.0, -1.0, 0.0, 0.0), abs=1e-3)
    assert advantages.fallbacks == 0


def test_a_group_of_one_falls_back_to_the_running_mean_and_says_so() -> None:
    means = RunningMeans.fresh(0.9, session=0.25)
    advantages = assign([trajectory(turn([4]), reward=1.0)], [0], GRPO, means)
    assert advantages.session == (0.75,)
    assert advantages.fallbacks == 1


def test_an_absent_reward_is_not_zero() -> None:
    batch = [trajectory(turn([4]), reward=reward) for reward in (1.0, None, 1.0)]
    advantages = assign(batch, [0, 0, 0], GRPO, MEANS)
    assert advantages.all_zero
    assert advantages.means.session.value == 1.0


def test_rewards_are_clipped_shifted_and_scaled() -> None:
    settings = RewardSettings(low=-1.0, high=1.0, bias=0.5, scale=2.0)
    assert shaped([-3.0, 0.25, 3.0], settings).tolist() == [-1.0, 1.5, 3.0]
    assert shaped([], settings).numel() == 0
