from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.contract.trajectory import TrajectoryTurn
from tests.trainer.tiny import trajectory, turn
from trainer.algorithm.advantages import RunningMeans, assign, continued, credit, discounts, shaped
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


@st.composite
def token_trees(draw: st.DrawFn) -> list[TrajectoryTurn]:
    """Turns that each keep any number of the tokens of a path before them; some have no output."""
    turns: list[TrajectoryTurn] = []
    lengths: list[int] = []
    for number in range(draw(st.integers(1, 8))):
        parent = None if number == 0 else draw(st.none() | st.integers(0, number - 1))
        kept = 0 if parent is None else draw(st.integers(0, lengths[parent]))
        prompt = [1] * draw(st.integers(1 if kept == 0 else 0, 3))
        output = [2] * draw(st.integers(0, 3))
        turns.append(turn(output, prompt=prompt, parent=parent, prefix=kept))
        lengths.append(kept + len(prompt) + len(output))
    return turns


def outputs_kept(turns: list[TrajectoryTurn], number: int) -> list[int]:
    """The turns of whose output the prompt of `number` has a token, in the order of its path: token by token."""

    def path(index: int) -> list[tuple[int, bool]]:
        return [*prompt(index), *((index, True) for _ in turns[index].output_ids)]

    def prompt(index: int) -> list[tuple[int, bool]]:
        parent = turns[index].parent
        before = [] if parent is None else path(parent)[: turns[index].prefix_tokens]
        return [*before, *((index, False) for _ in turns[index].prompt_ids)]

    return list(dict.fromkeys(owner for owner, is_output in prompt(number) if is_output))


@given(token_trees())
def test_a_turn_goes_on_from_the_last_output_that_its_prompt_holds(turns: list[TrajectoryTurn]) -> None:
    for number, before in enumerate(continued(turns)):
        kept = outputs_kept(turns, number)
        assert before == (kept[-1] if kept else None)


@given(token_trees(), st.floats(0.1, 0.9))
def test_only_turns_that_hold_its_output_discount_a_turn(turns: list[TrajectoryTurn], discount: float) -> None:
    """What keeps no token of a turn's output could be left out, and the turn would weigh the same."""
    weights = discounts(continued(turns), discount)
    for number in range(len(turns)):
        later = [index for index in range(len(turns)) if number in outputs_kept(turns, index)]
        assert (weights[number] == 1.0) == (not later)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 3)), min_size=1, max_size=6), st.floats(0.1, 1.0))
def test_on_a_chain_each_turn_is_discounted_by_those_that_follow(
    sizes: list[tuple[int, int]], discount: float
) -> None:
    turns: list[TrajectoryTurn] = []
    path = 0
    for number, (prompt, output) in enumerate(sizes):
        parent = number - 1 if number else None
        turns.append(turn([2] * output, prompt=[1] * (prompt + 1), parent=parent, prefix=path))
        path += prompt + 1 + output
    weights = discounts(continued(turns), discount)
    assert weights == pytest.approx([discount ** (len(turns) - 1 - number) for number in range(len(turns))])


def test_a_branch_before_its_parents_output_is_no_later_turn_of_it() -> None:
    """A sub-agent that shares the root's prompt, and one that shares its answer: only the second comes after it."""
    root, beside, after = turn([4, 5]), turn([6], parent=0, prefix=2), turn([7], parent=0, prefix=5)
    assert continued([root, beside, after]) == [None, None, 0]
    assert discounts(continued([root, beside]), 0.5) == [1.0, 1.0]
    assert discounts(continued([root, beside, after]), 0.5) == [0.5, 1.0, 1.0]


def test_a_retemplated_past_goes_on_from_what_is_left_of_it() -> None:
    """The template strips the thoughts that begin the second answer: the third call keeps the first one alone."""
    first = turn([4, 5])
    second = turn([6, 7], prompt=[1], parent=0, prefix=5)
    stripped = turn([8], prompt=[1, 1], parent=1, prefix=6)
    shortened = turn([8], prompt=[1, 1], parent=1, prefix=7)
    assert continued([first, second, stripped]) == [None, 0, 0]
    assert continued([first, second, shortened]) == [None, 0, 1]
    assert discounts(continued([first, second, stripped]), 0.5) == [0.5, 1.0, 1.0]


def test_parallel_sub_agents_are_discounted_by_their_own_turns_alone() -> None:
    """However late the calls of one came in between those of the other."""
    root = turn([4])
    sub_agents = [
        turn([5], prompt=[2], parent=0, prefix=3),
        turn([6], prompt=[3], parent=0, prefix=3),
        turn([7], prompt=[2], parent=1, prefix=5),
        turn([8], prompt=[2], parent=3, prefix=7),
    ]
    alone = discounts(continued([root, sub_agents[1]]), 0.5)
    assert discounts(continued([root, *sub_agents]), 0.5) == [1.0, 0.25, alone[1], 0.5, 1.0]


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
