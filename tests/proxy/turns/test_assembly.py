from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.contract.arrays import pack_ids, pack_logprobs
from proxy.contract.identifiers import RunId, SessionId, TurnId
from proxy.contract.token_ids import TokenIds
from proxy.contract.trajectory import Trajectory
from proxy.contract.turn import Cut, FinishReason, Turn, TurnState
from proxy.turns.assembly import (
    BrokenTree,
    PathPiece,
    StoredTurn,
    assemble,
    is_trainable,
    lineage_of,
    path_of,
    trainable_turns,
)
from proxy.turns.service import TurnRecord
from tests.proxy.turns.world import turn_record

RUN = RunId("run_1")
SESSION = SessionId("ses_1")

ids = st.lists(st.integers(0, 2**31 - 1), max_size=5).map(tuple)


@st.composite
def trees(draw: st.DrawFn) -> list[tuple[Turn, tuple[int, ...]]]:
    """Draw turns in order of recording, each with its full path."""
    records: list[tuple[TurnRecord, tuple[int, ...]]] = []
    for _ in range(draw(st.integers(1, 8))):
        prompt, output = draw(ids), draw(ids)
        parent: TurnRecord | None = None
        prefix: tuple[int, ...] = ()
        if draw(st.booleans()) and records:
            parent, path = draw(st.sampled_from(records))
            prefix = path[: draw(st.integers(0, len(path)))]
        record = turn_record(
            RUN, SESSION, now=0.0, parent=parent, prefix_tokens=len(prefix), prompt_ids=prompt, output_ids=output
        )
        records.append((record, (*prefix, *prompt, *output)))
    return [(record.turn, path) for record, path in records]


def stored(turn: Turn) -> StoredTurn:
    return StoredTurn(
        id=turn.id,
        parent_id=turn.parent_id,
        prefix_tokens=turn.prefix_tokens,
        prompt_ids=pack_ids(turn.prompt_ids),
        output_ids=pack_ids(turn.output_ids),
        output_logprobs=pack_logprobs(turn.output_logprobs),
        spans=turn.spans,
        sampling=turn.sampling,
        state=turn.state,
        finish_reason=turn.finish_reason,
        continuation=turn.continuation,
        started_at=turn.started_at,
        finished_at=turn.finished_at,
        masked=turn.masked,
    )


def assembled(turns: list[Turn]) -> Trajectory:
    return assemble(
        [stored(turn) for turn in turns], session_id=SESSION, group_id=None, task=None, reward=1.0, turn_rewards={}
    )


def flat_path(trajectory: Trajectory, index: int) -> tuple[int, ...]:
    node = trajectory.turns[index]
    parent = () if node.parent is None else flat_path(trajectory, node.parent)
    return (*parent[: node.prefix_tokens], *node.prompt_ids, *node.output_ids)


@given(trees(), st.randoms(use_true_random=False))
def test_every_path_can_be_read_off_the_tree(tree: list[tuple[Turn, tuple[int, ...]]], rng: random.Random) -> None:
    paths = {turn.id: path for turn, path in tree}
    turns = [turn for turn, _ in tree]
    rng.shuffle(turns)
    trajectory = assembled(turns)
    assert sorted(node.id for node in trajectory.turns) == sorted(paths)
    for index, node in enumerate(trajectory.turns):
        assert node.parent is None or node.parent < index
        assert flat_path(trajectory, index) == paths[node.id]


@given(trees())
def test_nothing_is_stored_twice(tree: list[tuple[Turn, tuple[int, ...]]]) -> None:
    trajectory = assembled([turn for turn, _ in tree])
    stored = sum(len(node.prompt_ids) + len(node.output_ids) for node in trajectory.turns)
    added = sum(len(path) - turn.prefix_tokens for turn, path in tree)
    assert stored == added


@given(trees())
def test_turns_keep_the_recorded_order_if_parents_allow_it(tree: list[tuple[Turn, tuple[int, ...]]]) -> None:
    turns = [turn for turn, _ in tree]
    assert [node.id for node in assembled(turns).turns] == [turn.id for turn in turns]


@given(trees())
def test_packed_pieces_give_the_same_paths(tree: list[tuple[Turn, tuple[int, ...]]]) -> None:
    pieces: dict[str, PathPiece] = {
        turn.id: PathPiece(
            id=turn.id,
            parent_id=turn.parent_id,
            prefix_tokens=turn.prefix_tokens,
            prompt_ids=TokenIds.of(turn.prompt_ids),
            output_ids=TokenIds.of(turn.output_ids),
        )
        for turn, _ in tree
    }
    for turn, path in tree:
        assert path_of(turn.id, pieces) == path


def test_a_missing_parent_is_an_error() -> None:
    root = turn_record(RUN, SESSION, now=0.0)
    child = turn_record(RUN, SESSION, now=0.0, parent=root, prefix_tokens=5)
    with pytest.raises(BrokenTree):
        assembled([child.turn])
    piece = PathPiece(
        id=child.turn.id, parent_id=root.turn.id, prefix_tokens=5, prompt_ids=TokenIds(), output_ids=TokenIds()
    )
    with pytest.raises(BrokenTree):
        path_of(child.turn.id, {child.turn.id: piece})


def test_turns_have_their_finish_reason_and_state() -> None:
    whole = turn_record(RUN, SESSION, now=0.0).turn
    long = turn_record(RUN, SESSION, now=0.0, finish_reason=FinishReason.LENGTH).turn
    left = turn_record(RUN, SESSION, now=0.0, finish_reason=FinishReason.LENGTH, state=TurnState.TRUNCATED).turn
    nodes = assembled([whole, long, left]).turns
    assert [node.finish_reason for node in nodes] == [FinishReason.STOP, FinishReason.LENGTH, FinishReason.LENGTH]
    assert [node.cut for node in nodes] == [None, Cut.LENGTH, Cut.INTERRUPTED]


def test_rewards_go_to_their_turns() -> None:
    turns = [turn_record(RUN, SESSION, now=0.0).turn for _ in range(2)]
    trajectory = assemble(
        [stored(turn) for turn in turns],
        session_id=SESSION,
        group_id=None,
        task="t",
        reward=None,
        turn_rewards={TurnId(turns[1].id): -1.0},
    )
    assert [node.reward for node in trajectory.turns] == [None, -1.0]
    assert trajectory.reward is None


def test_failed_and_greedy_turns_are_not_trainable() -> None:
    assert is_trainable(turn_record(RUN, SESSION, now=0.0).turn)
    assert is_trainable(turn_record(RUN, SESSION, now=0.0, state=TurnState.TRUNCATED).turn)
    assert not is_trainable(turn_record(RUN, SESSION, now=0.0, state=TurnState.FAILED).turn)
    assert not is_trainable(turn_record(RUN, SESSION, now=0.0, temperature=0.0).turn)
    assert not is_trainable(turn_record(RUN, SESSION, now=0.0, output_ids=()).turn)


def test_an_abandoned_answer_is_not_trained() -> None:
    """The client timed out and repeated the call: the first attempt's two tokens belong to no path."""
    first = turn_record(RUN, SESSION, now=0.0)
    abandoned = turn_record(RUN, SESSION, now=0.0, parent=first, prefix_tokens=5, state=TurnState.TRUNCATED)
    again = turn_record(RUN, SESSION, now=0.0, parent=first, prefix_tokens=5)
    sibling = turn_record(RUN, SESSION, now=0.0, parent=abandoned, prefix_tokens=8)
    turns = [first.turn, abandoned.turn, again.turn]
    assert [node.trainable for node in assembled(turns).turns] == [True, False, True]
    assert trainable_turns([*turns, sibling.turn]) == {first.turn.id, again.turn.id, sibling.turn.id}
    continued = turn_record(RUN, SESSION, now=0.0, parent=abandoned, prefix_tokens=9)
    assert trainable_turns([*turns, continued.turn]) == {turn.id for turn in (*turns, continued.turn)}


@given(trees(), st.data())
def test_every_token_of_a_path_has_one_owner(tree: list[tuple[Turn, tuple[int, ...]]], data: st.DataObject) -> None:
    """Compare each token's owner with a walk up to the root."""
    turns = {turn.id: turn for turn, _ in tree}
    paths = {turn.id: path for turn, path in tree}
    pieces: dict[str, PathPiece] = {
        turn.id: PathPiece(
            id=turn.id,
            parent_id=turn.parent_id,
            prefix_tokens=turn.prefix_tokens,
            prompt_ids=TokenIds.of(turn.prompt_ids),
            output_ids=TokenIds.of(turn.output_ids),
        )
        for turn in turns.values()
    }
    turn, path = data.draw(st.sampled_from(tree))
    tokens = data.draw(st.integers(0, len(path)))
    owner = turns[TurnId(lineage_of(turn.id, pieces).owner(tokens))]
    assert paths[owner.id][:tokens] == path[:tokens]
    assert len(paths[owner.id]) >= tokens
    assert owner.parent_id is None or owner.prefix_tokens < tokens


def test_a_lineage_with_a_gap_is_broken() -> None:
    piece = PathPiece(id="b", parent_id="a", prefix_tokens=0, prompt_ids=TokenIds(), output_ids=TokenIds())
    with pytest.raises(BrokenTree):
        lineage_of("b", {"b": piece})
