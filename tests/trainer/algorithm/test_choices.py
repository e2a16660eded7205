from __future__ import annotations

from dataclasses import replace
from math import isclose
from statistics import pstdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.contract.trajectory import Trajectory
from tests.trainer.tiny import trajectory, turn
from trainer.algorithm.advantages import as_they_came, assign, continued, discounts
from trainer.algorithm.choices import against_siblings, siblings
from trainer.algorithm.gae import Discounts, RewardTree, tree_advantages
from trainer.algorithm.presets import resolve
from trainer.algorithm.running import RunningMeans
from trainer.batching.sequences import linearise
from trainer.config import AlgorithmSettings, RewardSettings

GRPO = resolve(AlgorithmSettings())
MEANS = RunningMeans.fresh(0.9)


def three_choices(*rewards: float | None, session: float | None = 1.0, taken: int = 1) -> Trajectory:
    """Return a first turn, three choices after it, and a turn that continues choice `taken`."""
    first = turn([4, 5])
    choices = [
        turn([6 + number, 5], parent=0, prefix=5, prompt=[9], reward=reward, superseded=number != taken)
        for number, reward in enumerate(rewards)
    ]
    last = turn([7], parent=1 + taken, prefix=8, prompt=[9])
    return trajectory(first, *choices, last, reward=session)


def test_choices_of_a_call_are_siblings_and_so_are_the_answers_to_a_repeated_call() -> None:
    member = three_choices(None, None, None)
    repeated = turn([3], parent=2, prefix=6, prompt=[])
    assert siblings([*member.turns, repeated]) == [0, 1, 1, 1, 4, 1]


def test_superseded_choices_do_not_get_the_sessions_reward() -> None:
    member = three_choices(None, None, None)
    found = assign([member, trajectory(turn([4]), reward=0.0)], [0, 0], GRPO, MEANS)
    assert found.turns[0] == pytest.approx((1.0, 0.0, 1.0, 0.0, 1.0), abs=1e-3)
    trained = {span.turn for sequence in linearise([member]) for span in sequence.spans}
    assert trained == {0, 2, 4}, "no token of them counts, not even in a denominator"


@pytest.mark.parametrize("rewards", [(1.0, 0.0, 0.5), (0.1, 0.1, 0.1), (100.0, None, 50.0)])
def test_choices_with_rewards_are_compared_with_each_other(rewards: tuple[float | None, ...]) -> None:
    member = three_choices(*rewards, session=None)
    found = assign([member], [0], GRPO, MEANS).turns[0]
    given_ = [reward for reward in rewards if reward is not None]
    mean, spread = sum(given_) / len(given_), pstdev(given_)
    for advantage, reward in zip(found[1:4], rewards, strict=True):
        wanted = 0.0 if reward is None or len(set(given_)) == 1 else (reward - mean) / spread
        assert advantage == (pytest.approx(wanted) if wanted else 0.0)
    trained = {span.turn for sequence in linearise([member]) for span in sequence.spans}
    assert trained == {0, 2, 4, *(place for place, reward in enumerate(rewards, 1) if reward is not None)}


@given(st.lists(st.floats(-100, 100), min_size=2, max_size=6), st.floats(-1e3, 1e3))
def test_a_choice_above_its_siblings_mean_has_a_positive_advantage(rewards: list[float], shift: float) -> None:
    turns = [turn([4]) for _ in rewards]
    found = against_siblings(turns, {place: reward + shift for place, reward in enumerate(rewards)})
    mean = sum(rewards) / len(rewards)
    for place, reward in enumerate(rewards):
        if not isclose(reward, mean, abs_tol=1e-6):
            assert (found[place] > 0) == (reward > mean)
    assert set(against_siblings(turns, dict.fromkeys(range(len(turns)), shift)).values()) == {0.0}


def test_superseded_choices_do_not_affect_earlier_turns() -> None:
    """Without the superseded choices, the first turn has the same distance from the end of its path."""
    turns = three_choices(None, None, None).turns
    assert continued(turns) == [None, None, 0, None, 2]
    assert discounts(continued(turns), 0.5)[0] == 0.25


def test_a_critic_is_not_used_for_superseded_choices() -> None:
    """The advantage of superseded choices is the difference to their siblings; earlier turns use the continued
    choice's value."""
    member = three_choices(1.0, 4.0, 1.0, session=10.0)
    rewards = as_they_came(member, 10.0, RewardSettings())
    assert rewards == (0.0, -1.0, 4.0, -1.0, 10.0)
    parents = tuple(continued(member.turns))
    values = [[0.5] * len(each.output_ids) for each in member.turns]
    nothing = [[0.0] * len(own) for own in values]
    tree = RewardTree(parents=parents, rewards=rewards, apart=frozenset({1, 3}))
    given_ = Discounts(discount=1, gae_lambda=1, turn_discount=0.5)
    found = tree_advantages(tree, values, nothing, given_)
    assert found == [[4.0, 4.0], [-1.0, -1.0], [8.5, 8.5], [-1.0, -1.0], [9.5]]
    costly = [[0.0, 0.0], [0.25, 0.5], [0.0, 0.0], [0.0, 0.0], [0.0]]
    assert tree_advantages(tree, values, costly, given_)[1] == [-1.75, -1.5]
    alone = replace(tree, parents=(None, 0, 1), rewards=(0.0, 4.0, 10.0), apart=frozenset())
    without = tree_advantages(alone, [values[0], values[2], values[4]], [[0.0] * 2, [0.0] * 2, [0.0]], given_)
    assert without == [found[0], found[2], found[4]]
