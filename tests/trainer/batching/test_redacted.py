"""Redacted tokens are only context: the others are trained as if nothing had been redacted."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from proxy.contract.trajectory import Trajectory
from tests.trainer.batching.test_sequences import trees
from tests.trainer.tiny import GRPO
from trainer.batching.grouping import Batch
from trainer.batching.packing import MicroBatch, pack
from trainer.batching.sequences import linearise
from trainer.batching.staleness import is_trained, unusable
from trainer.config import BatchSettings, Packing

_SETTINGS = BatchSettings(packing=Packing.PACKED, row_tokens=64, max_tokens_per_microbatch=256)
_PER_TOKEN = ("targets_N", "temperature_N", "behaviour_N", "staleness_N", "trajectory_N", "turn_N", "altered_N")


@st.composite
def redacted(draw: st.DrawFn) -> tuple[Trajectory, Trajectory]:
    """Return a trajectory, and the same one with masked tokens."""
    whole = draw(trees())
    turns = []
    for turn in whole.turns:
        own = len(turn.prompt_ids) + len(turn.output_ids)
        positions = draw(st.sets(st.integers(0, own - 1))) if own else set()
        spans = tuple((position, position + 1) for position in sorted(positions))
        turns.append(msgspec.structs.replace(turn, masked=spans))
    return whole, msgspec.structs.replace(whole, turns=tuple(turns))


def trained(trajectory: Trajectory) -> dict[tuple[int, int], tuple[float, ...]]:
    """Return the trained tokens by turn and position in its output."""
    batch = Batch(trajectories=(trajectory,), groups=(0,), base_version=3)
    advantages = [[1.0 + number for number in range(len(trajectory.turns))]]
    found: dict[tuple[int, int], tuple[float, ...]] = {}
    sequences = linearise([trajectory])
    micro_batches = pack(batch, advantages, sequences, _SETTINGS, GRPO)
    for part in micro_batches:
        assert all(len(getattr(part, name)) == len(part.predictor_N) for name in (*_PER_TOKEN, "advantages_N"))
        found.update(_tokens(part, trajectory))
    assert len(found) == sum(sequence.trained_tokens for sequence in sequences)
    return found


def _tokens(part: MicroBatch, trajectory: Trajectory) -> dict[tuple[int, int], tuple[float, ...]]:
    flat = part.input_ids_BT.flatten()
    assert flat[part.predictor_N + 1].tolist() == part.targets_N.tolist()
    positions: dict[int, list[int]] = {
        number: list(turn.learnt) for number, turn in enumerate(trajectory.turns) if is_trained(turn)
    }
    found = {}
    for index, number in enumerate(part.turn_N.tolist()):
        values = tuple(float(getattr(part, name)[index]) for name in (*_PER_TOKEN, "advantages_N"))
        found[number, positions[number].pop(0)] = values
    return found


@given(redacted())
def test_unredacted_tokens_are_trained_as_before(both: tuple[Trajectory, Trajectory]) -> None:
    whole, masked = both
    hidden = {
        (number, position - len(turn.prompt_ids))
        for number, turn in enumerate(masked.turns)
        for start, end in turn.masked
        for position in range(start, end)
    }
    expected = {key: values for key, values in trained(whole).items() if key not in hidden}
    assert trained(masked) == expected


@given(trees())
def test_a_fully_redacted_answer_gives_no_gradient(tree: Trajectory) -> None:
    turns = tuple(
        msgspec.structs.replace(turn, masked=((0, len(turn.prompt_ids) + len(turn.output_ids)),))
        for turn in tree.turns
        if turn.prompt_ids or turn.output_ids
    )
    if len(turns) < len(tree.turns):
        return
    hidden = msgspec.structs.replace(tree, turns=turns)
    assert not any(map(is_trained, hidden.turns))
    assert linearise([hidden]) == []
    assert unusable(hidden, base_version=3, max_staleness=99, vocabulary=10**6) is not None
