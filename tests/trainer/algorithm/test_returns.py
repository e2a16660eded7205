from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.algorithm.returns import positions, what_follows

Tree = tuple[list[int | None], list[float | None]]


@st.composite
def trees(draw: st.DrawFn) -> Tree:
    size = draw(st.integers(1, 8))
    parents = [None if index == 0 else draw(st.none() | st.integers(0, index - 1)) for index in range(size)]
    return parents, [draw(st.none() | st.floats(-5, 5)) for _ in range(size)]


def paths_from(parents: list[int | None], start: int) -> list[list[int]]:
    """Return the turns from this one to each leaf below it."""
    children = [index for index, parent in enumerate(parents) if parent == start]
    return [[start, *path] for child in children for path in paths_from(parents, child)] or [[start]]


@given(trees(), st.floats(0.1, 1.0))
def test_the_return_after_a_turn_is_the_mean_over_paths_of_discounted_sums(tree: Tree, discount: float) -> None:
    parents, rewards = tree
    for turn, found in enumerate(what_follows(rewards, parents, discount)):
        paths = [path[1:] for path in paths_from(parents, turn)]
        if all(rewards[each] is None for path in paths for each in path):
            assert found is None
            continue
        sums = [sum(discount**at * (rewards[each] or 0.0) for at, each in enumerate(path, 1)) for path in paths]
        assert found == pytest.approx(sum(sums) / len(sums), abs=1e-9)


def test_a_position_counts_the_turns_before_it_on_its_path() -> None:
    assert positions([None, 0, 0, 1, None, 4]) == [0, 1, 1, 2, 0, 1]
