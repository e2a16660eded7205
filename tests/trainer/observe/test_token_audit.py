"""The choice of trajectories whose tokens are recorded: repeatable, and with the largest gap among them."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from proxy.contract.trajectory import Trajectory
from tests.trainer.tiny import trajectory, turn
from trainer.batching.grouping import Batch
from trainer.observe.token_audit import audit_tokens, sampled
from trainer.update import TokenRecord


def batch_of(trajectories: list[Trajectory]) -> Batch:
    return Batch(trajectories=tuple(trajectories), groups=tuple(range(len(trajectories))), base_version=3)


def record(
    places: list[tuple[int, int]], logprobs: list[float], *, constrained: frozenset[int] = frozenset()
) -> TokenRecord:
    """Return a record of tokens at `places`, (trajectory, turn); the engine's log-probabilities are all −1."""
    count = len(places)
    return TokenRecord(
        logprobs_N=torch.tensor(logprobs),
        reference_N=torch.full((count,), torch.nan),
        behaviour_N=torch.full((count,), -1.0),
        entropy_N=torch.zeros(count),
        weight_N=torch.ones(count),
        clipped_N=torch.arange(count) % 2 == 0,
        advantages_N=torch.arange(count, dtype=torch.float32),
        values_N=torch.full((count,), torch.nan),
        returns_N=torch.full((count,), torch.nan),
        staleness_N=torch.ones(count),
        trajectory_N=torch.tensor([trajectory for trajectory, _ in places]),
        turn_N=torch.tensor([turn for _, turn in places]),
        altered_N=torch.tensor([index in constrained for index in range(count)]),
    )


def test_tokens_are_recorded_by_turn_in_output_order() -> None:
    """Turns of a trajectory may have been trained in different micro-batches."""
    own = trajectory(turn([7, 8]), turn([9], parent=0, prefix=5, prompt=[]))
    tokens = record([(0, 1), (0, 0), (0, 0)], [-1.5, -1.0, -2.0])
    first, second = audit_tokens(batch_of([own]), tokens, 1)
    assert (first.session_id, first.turn_id, second.turn_id) == (own.session_id, own.turns[0].id, own.turns[1].id)
    assert (first.logprobs, first.engine_logprobs) == ((-1.0, -2.0), (-1.0, -1.0))
    assert (first.advantages, first.clipped, first.staleness) == ((1.0, 2.0), (False, True), (1, 1))
    assert (second.logprobs, second.advantages, second.clipped) == ((-1.5,), (0.0,), (True,))


@given(st.integers(1, 12), st.integers(0, 11), st.integers(1, 12))
def test_the_trajectory_with_the_largest_gap_is_recorded(count: int, worst: int, sample: int) -> None:
    worst %= count
    batch = batch_of([trajectory(turn([1])) for _ in range(count)])
    logprobs = [-1.0] * count
    logprobs[worst] = -9.0
    tokens = record([(index, 0) for index in range(count)], logprobs)
    chosen = sampled(batch, tokens, sample)
    assert worst in chosen
    assert len(chosen) == len(set(chosen)) == min(sample, count)
    assert chosen == sampled(batch, tokens, sample) == sorted(chosen)
    assert set(chosen) <= set(sampled(batch, tokens, sample + 1))


def test_constrained_tokens_do_not_count_in_the_gap() -> None:
    batch = batch_of([trajectory(turn([1])) for _ in range(3)])
    tokens = record([(0, 0), (1, 0), (2, 0)], [-9.0, -1.1, -1.0], constrained=frozenset({0}))
    assert sampled(batch, tokens, 1) == [1]


def test_a_sample_of_zero_records_nothing() -> None:
    batch = batch_of([trajectory(turn([1]))])
    assert audit_tokens(batch, record([(0, 0)], [-1.0]), 0) == ()
    assert audit_tokens(batch, None, 4) == ()
