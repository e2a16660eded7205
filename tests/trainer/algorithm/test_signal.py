from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.trainer.tiny import trajectory, turn
from trainer.algorithm.presets import resolve
from trainer.algorithm.signal import levelled_groups, with_signal
from trainer.config import AlgorithmSettings


@given(st.lists(st.tuples(st.integers(0, 4), st.lists(st.sampled_from([0.0, 1.0, -0.5]), max_size=3)), max_size=12))
def test_a_group_is_trained_or_left_out_as_a_whole(drawn: list[tuple[int, list[float]]]) -> None:
    groups = [group for group, _ in drawn]
    found = with_signal(groups, [turns for _, turns in drawn])
    expected = [
        index
        for index, (group, _) in enumerate(drawn)
        if any(value != 0 for other, turns in drawn if other == group for value in turns)
    ]
    assert found == expected


def test_rewards_that_bounds_made_equal_are_counted() -> None:
    algorithm = resolve(AlgorithmSettings.model_validate({"reward": {"low": 0.0, "high": 1.0}}))
    rewards = (3.0, 2.0, 1.0, 1.0, 0.0, 2.0, None, 5.0)
    members = [trajectory(turn([7]), reward=reward) for reward in rewards]
    assert levelled_groups(members, [0, 0, 1, 1, 2, 2, 3, 3], algorithm) == 1
