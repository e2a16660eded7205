"""Token trees to sequences: every trained token is in exactly one sequence, at its own place in its own context."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from proxy.contract.trajectory import Trajectory, TrajectoryTurn
from tests.trainer.tiny import trajectory, turn
from trainer.batching.sequences import linearise, training_sequences
from trainer.batching.staleness import is_trained, well_formed


@st.composite
def trees(draw: st.DrawFn, highest: int = 63) -> Trajectory:
    """Trees of all shapes: whole and cut continuations, branches, greedy turns, empty outputs."""
    ids = st.lists(st.integers(0, highest), max_size=5)
    turns: list[TrajectoryTurn] = []
    lengths: list[int] = []
    for index in range(draw(st.integers(1, 7))):
        parent = draw(st.none() | st.integers(0, index - 1)) if index else None
        reach = 0 if parent is None else lengths[parent]
        prefix = draw(st.just(reach) | st.integers(0, reach))
        prompt = draw(ids) if prefix else [1, *draw(ids)]
        output = draw(ids)
        made = turn(
            output,
            prompt=prompt,
            parent=parent,
            prefix=prefix,
            temperature=draw(st.sampled_from([1.0, 0.7, 0.0])),
            trainable=draw(st.booleans()),
        )
        turns.append(made)
        lengths.append(prefix + len(prompt) + len(output))
    return trajectory(*turns)


def path(tree: Trajectory, index: int) -> tuple[int, ...]:
    node = tree.turns[index]
    before = () if node.parent is None else path(tree, node.parent)[: node.prefix_tokens]
    return before + node.prompt_ids + node.output_ids


@given(tree=trees())
def test_every_trained_turn_is_in_exactly_one_sequence_in_its_own_context(tree: Trajectory) -> None:
    assert well_formed(tree, 64)
    sequences = training_sequences(tree, 3)
    seen = Counter(span.turn for sequence in sequences for span in sequence.spans)
    assert seen == {index: 1 for index, node in enumerate(tree.turns) if is_trained(node)}
    for sequence in sequences:
        assert sequence.trajectory == 3
        for span in sequence.spans:
            end = span.start + span.length
            assert span.length == len(tree.turns[span.turn].output_ids)
            assert span.start >= 1
            assert sequence.ids[:end] == path(tree, span.turn)
        assert len(sequence.ids) == max(span.start + span.length for span in sequence.spans)


def test_a_conversation_is_one_sequence() -> None:
    tree = trajectory(turn([4, 5], prompt=[1]), turn([6], prompt=[2], parent=0, prefix=3))
    (sequence,) = linearise([tree])
    assert sequence.ids == (1, 4, 5, 2, 6)
    assert [(span.turn, span.start, span.length) for span in sequence.spans] == [(0, 1, 2), (1, 4, 1)]


def test_branches_share_their_history_and_train_it_once() -> None:
    tree = trajectory(
        turn([4, 5], prompt=[1]),
        turn([6], prompt=[2], parent=0, prefix=3),
        turn([7], prompt=[3], parent=0, prefix=3),
    )
    first, second = linearise([tree])
    assert [span.turn for span in first.spans] == [0, 1]
    assert [span.turn for span in second.spans] == [2]
    assert second.ids == (1, 4, 5, 3, 7)


def test_an_output_that_was_cut_afterwards_is_trained_whole() -> None:
    tree = trajectory(turn([4, 5], prompt=[1]), turn([6], prompt=[2], parent=0, prefix=2))
    first, second = linearise([tree])
    assert (first.ids, second.ids) == ((1, 4, 5), (1, 4, 2, 6))
    assert [span.turn for span in second.spans] == [1]
