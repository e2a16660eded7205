from __future__ import annotations

import json
import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.contract.trajectory import Trajectory, TrajectoryTurn
from tests.trainer.tiny import trajectory, turn
from trainer.algorithm.advantages import Fallbacks, assign, continued, discounts, shaped
from trainer.algorithm.presets import PRESETS, resolve
from trainer.algorithm.running import SESSION, RunningMeans
from trainer.config import AlgorithmSettings, Baseline, RewardSettings, Scale

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
    """Token trees: each turn keeps any number of the tokens of an earlier path; some have no output."""
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
    """Return the turns whose output is partly in the prompt of `number`, in the order of its path, token by token."""

    def path(index: int) -> list[tuple[int, bool]]:
        return [*prompt(index), *((index, True) for _ in turns[index].output_ids)]

    def prompt(index: int) -> list[tuple[int, bool]]:
        parent = turns[index].parent
        before = [] if parent is None else path(parent)[: turns[index].prefix_tokens]
        return [*before, *((index, False) for _ in turns[index].prompt_ids)]

    return list(dict.fromkeys(owner for owner, is_output in prompt(number) if is_output))


@given(token_trees())
def test_a_turn_continues_the_last_output_in_its_prompt(turns: list[TrajectoryTurn]) -> None:
    for number, before in enumerate(continued(turns)):
        kept = outputs_kept(turns, number)
        assert before == (kept[-1] if kept else None)


@given(token_trees(), st.floats(0.1, 0.9))
def test_only_later_turns_that_contain_its_output_discount_a_turn(
    turns: list[TrajectoryTurn], discount: float
) -> None:
    """A turn whose output is not in a prompt could be left out, and the turn before would weigh the same."""
    weights = discounts(continued(turns), discount)
    for number in range(len(turns)):
        later = [index for index in range(len(turns)) if number in outputs_kept(turns, index)]
        assert (weights[number] == 1.0) == (not later)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 3)), min_size=1, max_size=6), st.floats(0.1, 1.0))
def test_on_a_chain_each_turn_is_discounted_by_the_later_ones(sizes: list[tuple[int, int]], discount: float) -> None:
    turns: list[TrajectoryTurn] = []
    path = 0
    for number, (prompt, output) in enumerate(sizes):
        parent = number - 1 if number else None
        turns.append(turn([2] * output, prompt=[1] * (prompt + 1), parent=parent, prefix=path))
        path += prompt + 1 + output
    weights = discounts(continued(turns), discount)
    assert weights == pytest.approx([discount ** (len(turns) - 1 - number) for number in range(len(turns))])


def test_a_branch_before_its_parents_output_is_not_a_later_turn() -> None:
    """One sub-agent shares the root's prompt, another its answer: only the second counts as a later turn."""
    root, beside, after = turn([4, 5]), turn([6], parent=0, prefix=2), turn([7], parent=0, prefix=5)
    assert continued([root, beside, after]) == [None, None, 0]
    assert discounts(continued([root, beside]), 0.5) == [1.0, 1.0]
    assert discounts(continued([root, beside, after]), 0.5) == [0.5, 1.0, 1.0]


def test_a_retemplated_history_continues_its_remaining_outputs() -> None:
    """The template strips the thoughts at the beginning of the second answer, so the third call keeps only the
    first."""
    first = turn([4, 5])
    second = turn([6, 7], prompt=[1], parent=0, prefix=5)
    stripped = turn([8], prompt=[1, 1], parent=1, prefix=6)
    shortened = turn([8], prompt=[1, 1], parent=1, prefix=7)
    assert continued([first, second, stripped]) == [None, 0, 0]
    assert continued([first, second, shortened]) == [None, 0, 1]
    assert discounts(continued([first, second, stripped]), 0.5) == [0.5, 1.0, 1.0]


def test_parallel_sub_agents_are_discounted_only_by_their_own_turns() -> None:
    """The order in which parallel calls arrive does not matter."""
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
    assert assign([tree], [0], GRPO, MEANS).turns == ((0.0, 1.0, 0.0),)


def chain(*rewards: float | None, session: float | None = None, task: str | None = None) -> Trajectory:
    """Return consecutive turns, each with its reward."""
    turns = [turn([4], prompt=[1], parent=None if at == 0 else at - 1, prefix=2 * at) for at in range(len(rewards))]
    turns = [msgspec.structs.replace(each, reward=reward) for each, reward in zip(turns, rewards, strict=True)]
    return msgspec.structs.replace(trajectory(*turns, reward=session), task=task)


def test_turn_rewards_are_compared_by_position_within_the_group() -> None:
    """In a group of its own, 100 and 0 at the first turn weigh as much as 1 and 0 in another group."""
    batch = [chain(100.0), chain(0.0), chain(1.0), chain(0.0)]
    found = assign(batch, [0, 0, 1, 1], GRPO, MEANS)
    assert found.turns == ((1.0,), (-1.0,), (1.0,), (-1.0,))
    assert found.fallbacks == Fallbacks(rewarded=4)


def test_turn_rewards_have_the_unit_of_session_rewards() -> None:
    """Rewards are summed: 100 beside 1 counts a hundred times as much, and their sum has about the scale of the
    larger."""
    ((first,), (second,)) = assign([chain(100.0, session=1.0), chain(0.0, session=0.0)], [0, 0], GRPO, MEANS).turns
    assert first == -second == pytest.approx(50.5 / math.sqrt(50**2 + 0.5**2))


@pytest.mark.parametrize("preset", ["grpo", "rloo", "reinforce_pp", "dr_grpo"])
def test_turn_rewards_enter_the_preset(preset: str) -> None:
    algorithm = resolve(AlgorithmSettings(preset=preset))
    batch = [chain(3.0), chain(1.0), chain(1.0), chain(0.0), chain(2.0), chain(2.0)]
    found = [turns[0] for turns in assign(batch, [0, 0, 0, 0, 1, 1], algorithm, MEANS).turns]
    group, spread = [1.75, -0.25, -0.25, -1.25], math.sqrt((1.75**2 + 2 * 0.25**2 + 1.25**2) / 4)
    wanted = {
        "grpo": [each / spread for each in group] + [0, 0],
        "rloo": [4 / 3 * each for each in group] + [0, 0],
        "dr_grpo": [*group, 0, 0],
        "reinforce_pp": [1.5, -0.5, -0.5, -1.5, 0.5, 0.5],  # the learner divides them, over all tokens
    }
    assert found == pytest.approx(wanted[preset], abs=1e-12)


def test_turn_rewards_are_returns_to_go() -> None:
    algorithm = resolve(AlgorithmSettings(baseline=Baseline.NONE, scale=Scale.NONE, turn_discount=0.5))
    assert assign([chain(1.0, None, 4.0, None)], [0], algorithm, MEANS).turns == ((2.0, 2.0, 4.0, 0.0),)


def test_turn_rewards_without_a_group_use_running_estimates_of_their_position() -> None:
    algorithm = resolve(AlgorithmSettings(turn_discount=0.5))
    first = assign([chain(1.0, 4.0)], [0], algorithm, MEANS)
    assert first.turns[0] == pytest.approx((3 / math.sqrt(12.5), 4 / math.sqrt(12.5)))
    assert [first.means.baseline(None, place) for place in (SESSION, 0, 1)] == [0.0, 3.0, 4.0]
    again = assign([chain(1.0, 4.0)], [0], algorithm, first.means)
    assert again.turns == ((0.0, 0.0),)
    assert again.all_zero
    assert again.fallbacks == Fallbacks(rewarded=1, trajectories=1, without_task=1, turns=2)


def test_groups_are_compared_within_themselves() -> None:
    batch = [trajectory(turn([4]), reward=reward) for reward in (1.0, 0.0, 5.0, 5.0)]
    advantages = assign(batch, [0, 0, 1, 1], GRPO, MEANS)
    assert advantages.session == (1.0, -1.0, 0.0, 0.0)
    assert advantages.fallbacks == Fallbacks(rewarded=4)


def test_a_single_session_has_the_scale_of_groups() -> None:
    """Rewards of 0 to 100: a single session is compared with the run's mean and spread, members with those of their
    group."""
    seen = [trajectory(turn([4]), reward=reward) for reward in (20.0, 100.0, 100.0, 20.0)]
    means = assign(seen, [0, 1, 2, 3], GRPO, MEANS).means
    assert means.baseline(None, SESSION) == 60.0
    batch = [trajectory(turn([4]), reward=reward) for reward in (100.0, 0.0, 0.0, 0.0, 0.0)]
    found = assign(batch, [0, 0, 0, 0, 1], GRPO, means)
    assert found.session[:4] == pytest.approx((math.sqrt(3), *[-1 / math.sqrt(3)] * 3))
    kept, added = 0.9**5 * (1 - 0.9**4), 1 - 0.9**5
    spread = math.sqrt((kept * 40**2 + added * (40**2 + 4 * 60**2) / 5) / (kept + added))
    assert found.session[4] == pytest.approx(-60 / spread)
    assert -2 < found.session[4] < -1
    assert found.fallbacks == Fallbacks(rewarded=5, trajectories=1, without_task=1)


def test_the_first_reward_of_a_run_pushes_in_the_direction_of_its_sign() -> None:
    for reward in (60.0, -0.001):
        assert assign([trajectory(turn([4]), reward=reward)], [0], GRPO, MEANS).session == (math.copysign(1, reward),)


@pytest.mark.parametrize(
    "preset", [name for name, each in PRESETS.items() if each.learns_from_rewards and name != "ppo"]
)
@pytest.mark.parametrize("value", [0.1, -7.3, 100.0, 1e-9, 1 / 3])
def test_equal_rewards_have_an_advantage_of_exactly_zero(preset: str, value: float) -> None:
    algorithm = resolve(AlgorithmSettings(preset=preset))
    batch = [chain(value, value, session=value) for _ in range(3)]
    for groups in ([0, 0, 0], [0, 1, 2]):
        means = assign(batch, groups, algorithm, MEANS).means
        found = assign([*batch, *batch], [*groups, *(each + 3 for each in groups)], algorithm, means)
        assert found.all_zero


def test_rewards_separated_by_rounding_are_equal() -> None:
    batch = [trajectory(turn([4]), reward=reward) for reward in (0.1 + 0.2, 0.3, 0.3)]
    assert batch[0].reward != batch[1].reward
    assert assign(batch, [0, 0, 0], GRPO, MEANS).all_zero


def test_an_absent_reward_is_not_zero() -> None:
    batch = [trajectory(turn([4]), reward=reward) for reward in (1.0, None, 1.0)]
    advantages = assign(batch, [0, 0, 0], GRPO, MEANS)
    assert advantages.all_zero
    assert advantages.means.baseline(None, SESSION) == 1.0


def test_a_session_is_compared_with_the_estimates_of_its_task() -> None:
    seen = [chain(None, session=reward, task=task) for task, reward in [("easy", 90.0), ("hard", 10.0)] * 40]
    means = assign(seen, list(range(80)), GRPO, MEANS).means
    good, poor = chain(None, session=30.0, task="hard"), chain(None, session=70.0, task="easy")
    found = assign([good, poor, chain(None, session=50.0)], [0, 1, 2], GRPO, means)
    assert found.session[0] > 0.5
    assert found.session[1] < -0.5
    assert found.session[2] == pytest.approx(0.0, abs=0.1)
    assert found.fallbacks == Fallbacks(rewarded=3, trajectories=3, without_task=1)


def asking(question: bytes | None, *rewards: float | None, session: float) -> Trajectory:
    """Return consecutive turns of a session that names no task, after this first message."""
    return msgspec.structs.replace(chain(*rewards, session=session), first_message=question)


@pytest.mark.parametrize("preset", [name for name in PRESETS if PRESETS[name].learns_from_rewards])
@pytest.mark.parametrize("value", [0.1, -7.3, 100.0])
def test_equal_rewards_of_a_first_message_have_an_advantage_of_exactly_zero(preset: str, value: float) -> None:
    parts = {} if PRESETS[preset].has_critic else {"task_by": "first_message"}
    algorithm = resolve(AlgorithmSettings.model_validate({"preset": preset, **parts}))
    batch = [asking(question, value, value, session=value) for question in (b"a", b"a", b"b", None)]
    means = assign(batch, [0, 1, 2, 3], algorithm, MEANS).means
    assert algorithm.has_critic or assign(batch, [0, 1, 2, 3], algorithm, means).all_zero


def test_a_session_without_a_task_is_compared_with_its_first_message_if_that_is_wanted() -> None:
    seen = [asking(question, None, session=reward) for question, reward in [(b"easy", 90.0), (b"hard", 10.0)] * 40]
    good, poor = asking(b"hard", None, session=30.0), asking(b"easy", None, session=70.0)
    named = msgspec.structs.replace(poor, task="another")
    for task_by, signs in (("first_message", (1, -1, 1)), ("name", (-1, 1, 1))):
        algorithm = resolve(AlgorithmSettings.model_validate({"task_by": task_by}))
        means = assign(seen, list(range(80)), algorithm, MEANS).means
        written = RunningMeans.from_json(means.decay, json.loads(json.dumps(means.as_json())))
        found = assign([good, poor, named], [0, 1, 2], algorithm, written)
        assert [math.copysign(1, each) for each in found.session] == list(signs), task_by
        assert found.fallbacks.without_task == (0 if task_by == "first_message" else 2)


def test_rewards_are_clipped_shifted_and_scaled() -> None:
    settings = RewardSettings(low=-1.0, high=1.0, bias=0.5, scale=2.0)
    assert shaped([-3.0, 0.25, 3.0], settings).tolist() == [-1.0, 1.5, 3.0]
    assert shaped([], settings).numel() == 0
