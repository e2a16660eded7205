from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from proxy.contract.trajectory import Trajectory
from proxy.contract.turn import LogprobConvention
from tests.trainer.batching.test_sequences import trees
from tests.trainer.tiny import GRPO, trajectory, turn
from trainer.batching.grouping import Batch
from trainer.batching.packing import idle_micro_batch, pack, pack_rows, split_rows
from trainer.batching.sequences import linearise
from trainer.batching.staleness import is_trained
from trainer.config import BatchSettings, Packing

lengths = st.lists(st.integers(1, 40), max_size=30)


@given(lengths=lengths, bound=st.integers(1, 40))
def test_rows_hold_every_sequence_once_within_the_bound(lengths: list[int], bound: int) -> None:
    rows = pack_rows(lengths, bound)
    assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
    for row in rows:
        assert len(row) == 1 or sum(lengths[index] for index in row) <= bound
    fitting = [length for length in lengths if length <= bound]
    half_empty = [row for row in rows if 2 * sum(lengths[index] for index in row) <= bound]
    assert len(half_empty) <= 1  # Two such rows would have fitted into one.
    assert len(rows) <= len(lengths) - len(fitting) + 2 * -(-sum(fitting) // bound)


@given(lengths=lengths, bound=st.integers(1, 200))
def test_micro_batches_hold_every_row_once_within_the_bound(lengths: list[int], bound: int) -> None:
    parts = split_rows(lengths, bound)
    assert sorted(row for part in parts for row in part) == list(range(len(lengths)))
    for part in parts:
        assert len(part) == 1 or len(part) * max(lengths[row] for row in part) <= bound


@given(
    members=st.lists(trees(), min_size=1, max_size=4),
    row_tokens=st.integers(1, 30),
    rows=st.integers(1, 4),
    silent=st.booleans(),
)
def test_every_output_token_is_trained_once_with_what_belongs_to_it(
    members: list[Trajectory], row_tokens: int, rows: int, silent: bool
) -> None:
    batch = Batch(trajectories=tuple(members), groups=tuple(range(len(members))), base_version=3)
    advantages = [
        [0.0 if silent and index == 0 else 10.0 * index + number + 1 for number in range(len(member.turns))]
        for index, member in enumerate(members)
    ]
    settings = BatchSettings(
        packing=Packing.PACKED, row_tokens=row_tokens, max_tokens_per_microbatch=row_tokens * rows
    )
    found = []
    for micro_batch in pack(batch, advantages, linearise(members), settings, GRPO):
        assert micro_batch.learns is bool((micro_batch.advantages_N != 0).any())
        flat = micro_batch.input_ids_BT.flatten()
        assert flat[micro_batch.predictor_N + 1].tolist() == micro_batch.targets_N.tolist()
        positions = micro_batch.position_ids_BT.flatten()
        assert (positions[micro_batch.predictor_N + 1] == positions[micro_batch.predictor_N] + 1).all()
        columns = (
            micro_batch.trajectory_N,
            micro_batch.targets_N,
            micro_batch.behaviour_N,
            micro_batch.temperature_N,
            micro_batch.advantages_N,
            micro_batch.staleness_N,
        )
        found += list(zip(*(column.tolist() for column in columns), strict=True))
    wanted = [
        (index, token, logprob, torch.tensor(node.temperature).item(), advantages[index][number], 3.0)
        for index, member in enumerate(members)
        for number, node in enumerate(member.turns)
        if is_trained(node)
        for token, logprob in zip(node.output_ids, node.logprobs, strict=True)
    ]
    assert sorted(found) == sorted(wanted)


def test_tokens_without_a_choice_in_a_constrained_turn_have_no_advantage() -> None:
    logprobs = (-0.7, 0.0, -1e-6, -3.0)
    constrained = turn([4, 5, 6, 7], logprobs=logprobs, convention=LogprobConvention.CONSTRAINED)
    free = turn([4, 5, 6, 7], logprobs=logprobs)
    batch = Batch(trajectories=(trajectory(constrained), trajectory(free)), groups=(0, 0), base_version=0)
    (packed,) = pack(batch, [[2.0], [3.0]], linearise(batch.trajectories), BatchSettings(), GRPO)
    by_owner = [packed.trajectory_N == owner for owner in (0, 1)]
    assert packed.advantages_N[by_owner[0]].tolist() == [2.0, 0.0, 0.0, 2.0]
    assert packed.advantages_N[by_owner[1]].tolist() == [3.0] * 4
    assert packed.altered_N[by_owner[0]].all()
    assert not packed.altered_N[by_owner[1]].any()
    assert packed.forced_N[by_owner[0]].tolist() == [False, True, True, False]
    assert not packed.forced_N[by_owner[1]].any()


@pytest.mark.parametrize("convention", [LogprobConvention.ADJUSTED, LogprobConvention.UNTRUNCATED])
def test_tokens_of_an_altered_distribution_are_marked_and_count_as_choices(
    convention: LogprobConvention,
) -> None:
    """After a penalty or a bias too, a probability of 1 is the policy's own."""
    batch = Batch(
        trajectories=(trajectory(turn([4, 5], logprobs=(0.0, -3.0), convention=convention)),),
        groups=(0,),
        base_version=0,
    )
    (packed,) = pack(batch, [[2.0]], linearise(batch.trajectories), BatchSettings(), GRPO)
    assert packed.altered_N.all()
    assert packed.advantages_N.tolist() == [2.0, 2.0]


def test_an_idle_micro_batch_trains_nothing() -> None:
    for learns in (True, False):
        assert idle_micro_batch(learns).targets_N.numel() == 0
        assert idle_micro_batch(learns).learns is learns
