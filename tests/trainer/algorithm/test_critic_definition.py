"""What a critic makes of a session's and its turns' rewards, against the λ-return of every path in float64.

The reference knows no δ and no RewardTree: it reads paths off the tokens. On the path to a leaf, a λ-return is

    G = (1 − λ) Σₙ λⁿ⁻¹ Gₙ + λᴺ⁻¹ G_N,    Gₙ = r₁ + g₁ r₂ + … + g₁…gₙ V(n tokens later)

with r the reward that comes with a token (a turn's own with its last one, the session's with the last of the path)
and g the discount after it: γ, and γ · turn_discount where the next token is of a later turn. A is the mean of G over
the leaves that can be reached, less V (Schulman et al. 2016, Sutton & Barto 2018, 12.1).
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.contract.trajectory import Trajectory, TrajectoryTurn
from proxy.contract.turn import TurnState
from tests.trainer.tiny import trajectory, turn
from trainer.algorithm.advantages import as_they_came, continued, discounts
from trainer.algorithm.gae import Discounts, RewardTree, tree_advantages
from trainer.config import RewardSettings

numbers = st.floats(-2, 2)


@dataclass(frozen=True)
class Given:
    """A session whose turns are chosen token by token, with the critic's value before each."""

    member: Trajectory
    values: list[list[float]]
    discounts: Discounts


@st.composite
def sessions(draw: st.DrawFn) -> Given:
    """Sessions whose turns keep any part of an earlier path, so that some branch within an answer or before it."""
    turns: list[TrajectoryTurn] = []
    lengths: list[int] = []
    for number in range(draw(st.integers(1, 6))):
        parent = draw(st.none() | st.integers(0, number - 1)) if number else None
        kept = 0 if parent is None else draw(st.integers(0, lengths[parent]))
        prompt = [1] * draw(st.integers(1 if kept == 0 else 0, 2))
        output = [2] * draw(st.integers(1, 3))
        turns.append(turn(output, prompt=prompt, parent=parent, prefix=kept, reward=draw(st.none() | numbers)))
        lengths.append(kept + len(prompt) + len(output))
    return Given(
        trajectory(*turns, reward=draw(st.none() | numbers)),
        [[draw(numbers) for _ in each.output_ids] for each in turns],
        Discounts(
            discount=draw(st.floats(0.5, 1)),
            gae_lambda=draw(st.floats(0, 1)),
            turn_discount=draw(st.floats(0.1, 1)),
        ),
    )


def answers_before(member: Trajectory, number: int) -> list[int]:
    """Return the turns whose answer is partly in the prompt of `number`, token by token, in order."""

    def path(index: int) -> list[int | None]:
        return [*prompt(index), *(index for _ in member.turns[index].output_ids)]

    def prompt(index: int) -> list[int | None]:
        parent = member.turns[index].parent
        before = [] if parent is None else path(parent)[: member.turns[index].prefix_tokens]
        return [*before, *(None for _ in member.turns[index].prompt_ids)]

    return list(dict.fromkeys(owner for owner in prompt(number) if owner is not None))


def paths_from(member: Trajectory, number: int) -> list[list[int]]:
    """Return the paths from a turn to each leaf after it: turns that contain its answer and whose own answer no turn
    contains."""
    before = [answers_before(member, index) for index in range(len(member.turns))]
    held = {owner for owners in before for owner in owners[-1:]}
    leaves = [index for index in range(len(member.turns)) if index not in held]
    lines = [[*before[leaf], leaf] for leaf in leaves]
    return [line[line.index(number) :] for line in lines if number in line]


def lambda_return(case: Given, path: list[int], start: int) -> float:
    """Return the λ-return of the token `start` of the path's first turn."""
    member, each = case.member, case.discounts
    rewards: list[float] = []
    values: list[float] = []
    factors: list[float] = []
    for depth, number in enumerate(path):
        own = member.turns[number].reward or 0.0
        if number == path[-1]:
            own += member.reward or 0.0
        places = range(start if depth == 0 else 0, len(case.values[number]))
        for place in places:
            last = place == places[-1]
            rewards.append(own if last else 0.0)
            values.append(case.values[number][place])
            factors.append(each.discount * (each.turn_discount if last else 1.0))
    horizon = len(rewards)

    def after(steps: int) -> float:
        total, weight = 0.0, 1.0
        for reward, factor in zip(rewards[:steps], factors[:steps], strict=True):
            total += weight * reward
            weight *= factor
        return total + (weight * values[steps] if steps < horizon else 0.0)

    weight = each.gae_lambda
    mixed = sum((1 - weight) * weight ** (steps - 1) * after(steps) for steps in range(1, horizon))
    return mixed + weight ** (horizon - 1) * after(horizon)


def advantages(case: Given, member: Trajectory | None = None) -> list[list[float]]:
    of = member or case.member
    tree = RewardTree(
        parents=tuple(continued(of.turns)),
        rewards=as_they_came(of, of.reward or 0.0, RewardSettings()),
    )
    return tree_advantages(tree, case.values, [[0.0] * len(own) for own in case.values], case.discounts)


@given(sessions())
def test_an_advantage_is_the_mean_lambda_return_of_the_paths_less_the_value(case: Given) -> None:
    for number, found in enumerate(advantages(case)):
        for place, advantage in enumerate(found):
            every = [lambda_return(case, path, place) for path in paths_from(case.member, number)]
            assert advantage == pytest.approx(sum(every) / len(every) - case.values[number][place], abs=1e-9)


@given(sessions(), st.data())
def test_a_turns_reward_is_credited_to_that_turn_and_earlier_ones(case: Given, data: st.DataObject) -> None:
    """More reward for one turn increases its own credit and that of all turns in its prompt, less with distance, and
    no other."""
    number = data.draw(st.integers(0, len(case.member.turns) - 1))
    turns = list(case.member.turns)
    more = turn(
        turns[number].output_ids,
        prompt=turns[number].prompt_ids,
        parent=turns[number].parent,
        prefix=turns[number].prefix_tokens,
        reward=(turns[number].reward or 0.0) + 1.0,
    )
    changed = trajectory(*turns[:number], more, *turns[number + 1 :], reward=case.member.reward)
    certain = Given(
        case.member, case.values, Discounts(discount=1, gae_lambda=1, turn_discount=case.discounts.turn_discount)
    )
    line = answers_before(case.member, number)
    for index, (found, before) in enumerate(zip(advantages(certain, changed), advantages(certain), strict=True)):
        gained = [after - earlier for after, earlier in zip(found, before, strict=True)]
        if index == number:
            assert gained == pytest.approx([1.0] * len(gained), abs=1e-9)
        elif index in line:
            # The share of the paths from that turn on that go through `number`.
            paths = paths_from(case.member, index)
            share = sum(number in path for path in paths) / len(paths)
            steps = len(line) - line.index(index)
            wanted = share * certain.discounts.turn_discount**steps
            assert gained == pytest.approx([wanted] * len(gained), abs=1e-9)
        else:
            assert gained == pytest.approx([0.0] * len(gained), abs=1e-9)


@pytest.mark.parametrize(
    "dropped",
    [turn([], parent=0, prefix=5, state=TurnState.FAILED), turn([9], parent=0, prefix=5, state=TurnState.TRUNCATED)],
)
def test_failed_and_abandoned_calls_do_not_affect_earlier_turns(dropped: object) -> None:
    """A failed or abandoned call does not end a path: the turn before it has the same distance from its end."""
    first = turn([4, 5])
    second, third = turn([6], parent=0, prefix=5, prompt=[9]), turn([7], parent=2, prefix=7, prompt=[9])
    turns = [first, dropped, second, third]
    assert continued(turns) == [None, None, 0, 2]  # type: ignore[arg-type]
    assert discounts(continued(turns), 0.5) == [0.25, 1.0, 0.5, 1.0]  # type: ignore[arg-type]
    member = trajectory(*turns, reward=8.0)  # type: ignore[arg-type]
    values = [[0.0] * len(each.output_ids) for each in member.turns]
    case = Given(member, values, Discounts(discount=1, gae_lambda=1, turn_discount=0.5))
    assert [found[0] for found in advantages(case) if found][-2:] == [4.0, 8.0]
    assert advantages(case)[0] == [2.0, 2.0]
    ended_so = trajectory(first, dropped, reward=8.0)  # type: ignore[arg-type]
    short = Given(ended_so, values[:2], case.discounts)
    assert advantages(short)[0] == [8.0, 8.0], "the session ended with the first turn"
