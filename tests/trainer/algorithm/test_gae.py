"""Compare advantages with direct double sums over every path, in float64."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.trainer.tiny import trajectory, turn
from trainer.algorithm.advantages import Fallbacks, as_they_came, assign, continued
from trainer.algorithm.gae import Discounts, RewardTree, batch_advantages, scaled, tree_advantages
from trainer.algorithm.presets import resolve
from trainer.algorithm.running import RunningMeans
from trainer.config import AlgorithmSettings, Baseline, RewardSettings, Scale

numbers = st.floats(-2, 2)
shares = st.floats(0, 1)


@st.composite
def trees(draw: st.DrawFn, *, least: int = 0) -> tuple[RewardTree, list[list[float]], list[list[float]]]:
    """Draw (tree, values, costs); turns have at least `least` tokens."""
    size = draw(st.integers(1, 6))
    parents = tuple(None if index == 0 else draw(st.none() | st.integers(0, index - 1)) for index in range(size))
    rewards = tuple(draw(numbers) for _ in range(size))
    values = [draw(st.lists(numbers, min_size=least, max_size=4)) for _ in range(size)]
    costs = [[draw(numbers) for _ in turn_values] for turn_values in values]
    return RewardTree(parents=parents, rewards=rewards), values, costs


discounts = st.builds(Discounts, discount=st.floats(0.5, 1), gae_lambda=shares, turn_discount=st.floats(0.1, 1))


def paths_from(tree: RewardTree, turn: int) -> list[list[int]]:
    """Return the turns from this one to each leaf below it."""
    children = [index for index, parent in enumerate(tree.parents) if parent == turn]
    return [[turn, *path] for child in children for path in paths_from(tree, child)] or [[turn]]


def on_one_path(
    tree: RewardTree,
    values: list[list[float]],
    costs: list[list[float]],
    path: list[int],
    start: int,
    given: Discounts,
) -> float:
    """Return Σ_k (γλ)^k δ_k over the tokens after `start` of the first turn, each δ from the paper; the discounts of
    turns multiply everything after them."""
    tokens = [
        (depth, turn, values[turn][place], costs[turn][place])
        for depth, turn in enumerate(path)
        for place in range(start if depth == 0 else 0, len(values[turn]))
    ]
    total = 0.0
    for step, (depth, place, value, cost) in enumerate(tokens):
        following = tokens[step + 1] if step + 1 < len(tokens) else None
        ends = following is None or following[0] != depth
        until = following[0] if following is not None else len(path)
        reward = tree.rewards[place] if ends else 0.0
        ahead = following[2] * given.turn_discount ** (following[0] - depth) if following is not None else 0.0
        for between in range(depth + 1, until):  # turns without a token
            ahead += tree.rewards[path[between]] * given.turn_discount ** (between - depth)
        delta = reward - cost + given.discount * ahead - value
        total += (given.discount * given.gae_lambda) ** step * given.turn_discount**depth * delta
    return total


@given(case=trees(), given=discounts)
def test_an_advantage_is_the_mean_over_the_paths_of_its_double_sum(
    case: tuple[RewardTree, list[list[float]], list[list[float]]], given: Discounts
) -> None:
    tree, values, costs = case
    found = tree_advantages(tree, values, costs, given)
    for number, advantages in enumerate(found):
        assert len(advantages) == len(values[number])
        for place, advantage in enumerate(advantages):
            every = [on_one_path(tree, values, costs, path, place, given) for path in paths_from(tree, number)]
            assert advantage == pytest.approx(sum(every) / len(every), abs=1e-9)


@given(case=trees(least=1), turn_discount=st.floats(0.1, 1))
def test_with_both_at_one_it_is_the_return_less_the_value(
    case: tuple[RewardTree, list[list[float]], list[list[float]]], turn_discount: float
) -> None:
    tree, values, costs = case
    found = tree_advantages(tree, values, costs, Discounts(discount=1, gae_lambda=1, turn_discount=turn_discount))

    def to_come(turn: int, place: int) -> float:
        own = tree.rewards[turn] - sum(costs[turn][place:])
        ends = paths_from(tree, turn)
        beyond = [
            sum(
                (tree.rewards[each] - sum(costs[each])) * turn_discount**depth
                for depth, each in enumerate(path)
                if depth > 0
            )
            for path in ends
        ]
        return own + sum(beyond) / len(ends)

    for number, advantages in enumerate(found):
        for place, advantage in enumerate(advantages):
            assert advantage == pytest.approx(to_come(number, place) - values[number][place], abs=1e-9)


@given(case=trees(least=1), discount=st.floats(0.5, 1))
def test_with_lambda_zero_it_is_the_error_of_one_step(
    case: tuple[RewardTree, list[list[float]], list[list[float]]], discount: float
) -> None:
    tree, values, costs = case
    line = RewardTree(parents=(None, *range(len(tree.parents) - 1)), rewards=tree.rewards)
    found = tree_advantages(line, values, costs, Discounts(discount=discount, gae_lambda=0, turn_discount=1))
    flat, less = ([each for of_turn in every for each in of_turn] for every in (values, costs))
    ends = {end - 1: reward for end, reward in zip(accumulate(map(len, values)), tree.rewards, strict=True)}
    wanted = [
        ends.get(place, 0.0) - less[place] + discount * (flat[place + 1] if place + 1 < len(flat) else 0) - value
        for place, value in enumerate(flat)
    ]
    assert [each for of_turn in found for each in of_turn] == pytest.approx(wanted, abs=1e-9)


@given(case=trees(least=1), turn_discount=st.floats(0.1, 1), reward=numbers)
def test_rewards_go_where_they_go_without_a_critic(
    case: tuple[RewardTree, list[list[float]], list[list[float]]], turn_discount: float, reward: float
) -> None:
    """With an untrained critic and γ = λ = 1, the credit is that of the other baselines."""
    tree, values, _ = case
    turns = [
        turn(
            [7] * len(own),
            prompt=(
                1,
                2,
                10 + number,
            ),  # answers to one prompt would be compared with each other
            parent=parent,
            prefix=0 if parent is None else 3 + len(values[parent]),
            reward=each,
        )
        for number, (parent, own, each) in enumerate(zip(tree.parents, values, tree.rewards, strict=True))
    ]
    member = trajectory(*turns, reward=reward)
    rewards = as_they_came(member, reward, RewardSettings())
    nothing = [[0.0] * len(own) for own in values]
    given = Discounts(discount=1, gae_lambda=1, turn_discount=turn_discount)
    parents = tuple(continued(turns))
    found = tree_advantages(RewardTree(parents=parents, rewards=rewards), nothing, nothing, given)
    algorithm = resolve(AlgorithmSettings(baseline=Baseline.NONE, scale=Scale.NONE, turn_discount=turn_discount))
    wanted = assign([member], [0], algorithm, RunningMeans.fresh(0.9)).turns[0]
    for own, each in zip(found, wanted, strict=True):
        assert own == pytest.approx([each] * len(own), abs=1e-9)


def test_rewards_come_at_the_end_of_their_turns() -> None:
    first = turn([4, 5], reward=0.5)
    branch = turn([6], parent=0, prefix=5)
    last = turn([7], parent=0, prefix=5, reward=-1.0)
    aside = turn([8], parent=0, prefix=3)  # contains no token of an answer
    member = trajectory(first, branch, last, aside, reward=2.0)
    settings = AlgorithmSettings(preset="ppo", reward=RewardSettings(high=1.0, scale=3.0))
    found = assign([member, trajectory(turn([9]), reward=None)], [0, 0], resolve(settings), RunningMeans.fresh(0.9))
    assert found.turns == ((1.5, 3.0, 0.0, 3.0), (0.0,))
    assert found.session == (3.0, 0.0)
    assert found.for_critic
    assert not found.all_zero
    assert found.fallbacks == Fallbacks(rewarded=1)


def test_a_batch_is_put_together_whatever_the_order_of_its_turns() -> None:
    tree = RewardTree(parents=(None, 0), rewards=(0.0, 1.0))
    other = RewardTree(parents=(None,), rewards=(-1.0,))
    found = batch_advantages(
        torch.tensor([1, 0, 0, 1, 1, 4]),
        torch.tensor([1, 0, 0, 0, 0, 0]),
        torch.tensor([0.5, 9.0, 9.0, 0.1, 0.2, 0.3]),
        torch.zeros(6),
        {1: tree, 0: RewardTree(parents=(None,), rewards=(0.0,)), 4: other},
        Discounts(discount=1, gae_lambda=0, turn_discount=1),
    )
    assert found.tolist() == pytest.approx([0.5, 0.0, -9.0, 0.1, 0.3, -1.3])


@given(values=st.lists(numbers, min_size=1, max_size=8))
def test_scaling_keeps_the_sign_and_makes_the_mean_square_one(values: list[float]) -> None:
    advantages_N = torch.tensor(values, dtype=torch.float64)
    found_N = scaled(advantages_N, Scale.BATCH_STD)
    assert found_N.sign().tolist() == advantages_N.sign().tolist()
    chosen_M = found_N[advantages_N != 0]
    if advantages_N.abs().max() > 0.1:
        assert chosen_M.square().mean().sqrt().item() == pytest.approx(1, rel=0.01)
    assert scaled(advantages_N, Scale.NONE) is advantages_N
