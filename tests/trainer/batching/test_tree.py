"""A shared prefix is computed once, and this changes no result."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from proxy.contract.trajectory import Trajectory
from tests.trainer.batching.test_sequences import trees
from tests.trainer.tiny import GRPO, load_tiny, trajectory, turn
from tests.trainer.weighted import Place, learn, weight
from trainer.algorithm.logprobs import token_logprobs
from trainer.batching.grouping import Batch
from trainer.batching.packing import pack
from trainer.batching.sequences import TrainingSequence, linearise
from trainer.batching.tree import Row, common_prefix, even_parts, tree_row, tree_rows
from trainer.config import BatchSettings, Packing, TrainerSettings
from trainer.models.archon.attention import positions_of
from trainer.models.archon.model import ArchonModel
from trainer.models.archon.weights import load_archon
from trainer.models.attention import tree_mask
from trainer.models.huggingface import PolicyModel

token_lists = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=9)


@pytest.fixture(scope="module", params=["fsdp", "archon"])
def model(tiny_model: Path, request: pytest.FixtureRequest) -> PolicyModel:
    if request.param == "fsdp":
        return load_tiny(tiny_model).double().eval()
    precision = TrainerSettings().precision
    return load_archon(tiny_model, precision, token_logprobs, activation_checkpointing=False).double().eval()


@given(one=st.lists(st.integers(0, 1)), other=st.lists(st.integers(0, 1)))
def test_the_common_prefix_is_the_longest(one: list[int], other: list[int]) -> None:
    pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    assert common_prefix(one, other) == len(list(pairs))


@given(sequences=token_lists)
def test_a_token_sees_its_own_past_and_nothing_else(sequences: list[list[int]]) -> None:
    row = tree_row(sequences, sorted(range(len(sequences)), key=sequences.__getitem__))
    assert len(row) == len({tuple(each[: end + 1]) for each in sequences for end in range(len(each))})
    seen = tree_mask(torch.tensor([row.reach]), torch.float32)[0, 0] == 0
    for member, places in zip(row.members, row.places, strict=True):
        assert [row.ids[place] for place in places] == sequences[member]
        assert [row.positions[place] for place in places] == list(range(len(places)))
        for end, place in enumerate(places):
            assert seen[place].nonzero()[:, 0].tolist() == sorted(places[: end + 1])
    assert row.branched is not bool(seen.tril().eq(torch.ones_like(seen).tril()).all())


@given(sequences=token_lists, bound=st.integers(1, 30))
def test_rows_and_parts_hold_every_sequence_once_within_the_bound(sequences: list[list[int]], bound: int) -> None:
    rows = tree_rows(sequences, bound)
    assert sorted(member for row in rows for member in row.members) == list(range(len(sequences)))
    assert all(len(row.members) == 1 or len(row) <= bound for row in rows)
    parts = even_parts(rows, bound)
    assert sorted(id(row) for part in parts for row in part) == sorted(id(row) for row in rows)
    for part in parts:
        assert len({row.branched for row in part}) == 1
        assert len(part) == 1 or len(part) * max(map(len, part)) <= bound


def row_of(length: int, first: int = 0) -> Row:
    return tree_row([range(first, first + length)], [0])


def test_sequences_share_a_row_only_if_they_share_much() -> None:
    prefix = list(range(512))
    branches = [[*prefix, *[1000 + branch] * 64] for branch in range(8)]
    (row,) = tree_rows(branches, 16384)
    assert len(row) == 512 + 8 * 64
    greeted = [[7, 8, *[1000 + number] * 400] for number in range(4)]
    assert [len(row) for row in tree_rows(greeted, 16384)] == [402] * 4
    many = tree_rows([[*prefix, *[1000 + branch] * 64] for branch in range(100)], 16384)
    assert 5 < len(many) < 20  # One row's attention would cost more than computing the prefix a few times.


def test_rows_of_one_length_form_one_micro_batch_and_a_long_one_another() -> None:
    short, long = [row_of(20) for _ in range(30)], row_of(900)
    assert sorted(map(len, even_parts([long, *short], 16384))) == [1, 30]


@settings(max_examples=25)
@given(
    members=st.lists(trees(2), min_size=1, max_size=4),
    bound=st.integers(8, 80),
    packing=st.sampled_from(Packing),
)
def test_log_probabilities_and_gradients_equal_those_of_single_sequences(
    model: PolicyModel, members: list[Trajectory], bound: int, packing: Packing
) -> None:
    batch = Batch(trajectories=tuple(members), groups=tuple(range(len(members))), base_version=3)
    sequences = linearise(members)
    if not sequences:
        return
    single, wanted = singly(model, members, sequences)
    found, gradient = laid_out(
        model, batch, sequences, BatchSettings(packing=packing, max_tokens_per_microbatch=bound)
    )
    assert found.keys() == single.keys()
    for place, value in found.items():
        assert abs(value - single[place]) < 1e-6
    torch.testing.assert_close(gradient, wanted, atol=1e-6 * float(wanted.abs().max()), rtol=0)


def test_in_float32_a_deep_tree_has_the_gradient_of_its_branches(tiny_model: Path) -> None:
    model = load_tiny(tiny_model).eval()
    generator = torch.Generator().manual_seed(0)

    def ids(count: int) -> list[int]:
        return torch.randint(0, 64, (count,), generator=generator).tolist()

    shared = ids(60)
    members = []
    for _ in range(4):
        turns = [turn(ids(10), prompt=shared)]
        for branch in range(3):
            turns.append(turn(ids(12), prompt=ids(4), parent=0, prefix=70))
            turns.append(turn(ids(8), prompt=ids(3), parent=1 + 2 * branch, prefix=86))
        members.append(trajectory(*turns))
    batch = Batch(trajectories=tuple(members), groups=(0, 0, 0, 0), base_version=0)
    sequences = linearise(members)
    single, wanted = singly(model, members, sequences)
    found, gradient = laid_out(model, batch, sequences, BatchSettings())
    assert max(abs(value - single[place]) for place, value in found.items()) < 1e-5
    torch.testing.assert_close(gradient, wanted, atol=1e-6 * float(wanted.abs().max()), rtol=0)


def singly(
    model: PolicyModel, members: list[Trajectory], sequences: list[TrainingSequence]
) -> tuple[dict[Place, float], Tensor]:
    """Return the transformer's results for each sequence alone, and the gradient of the weighted sum."""
    model.zero_grad(set_to_none=True)
    values: dict[Place, float] = {}
    for sequence in sequences:
        logits_TV = logits_of(model, torch.tensor([sequence.ids]))[0]
        terms = []
        for span in sequence.spans:
            node = members[sequence.trajectory].turns[span.turn]
            for position, token in enumerate(node.output_ids):
                logprobs_V = (logits_TV[span.start + position - 1] / node.temperature).log_softmax(-1)
                terms.append(weight(sequence.trajectory, span.turn, position) * logprobs_V[token])
                values[sequence.trajectory, span.turn, position] = logprobs_V[token].item()
        torch.autograd.backward(torch.stack(terms).sum())
    return values, gradient_of(model)


def logits_of(model: PolicyModel, ids_BT: Tensor) -> Tensor:
    if isinstance(model, ArchonModel):
        positions = positions_of(torch.arange(ids_BT.shape[1])[None], model.config)
        logits: Tensor = model.causal.lm_head(model.causal.model(ids_BT, positions))
        return logits
    inner: Any = model.inner
    of_transformers: Tensor = inner(input_ids=ids_BT, use_cache=False).logits
    return of_transformers


def laid_out(
    model: PolicyModel, batch: Batch, sequences: list[TrainingSequence], settings: BatchSettings
) -> tuple[dict[Place, float], Tensor]:
    """Return the same, computed by micro-batches."""
    model.zero_grad(set_to_none=True)
    advantages = [[1.0] * len(member.turns) for member in batch.trajectories]
    values = learn(model, pack(batch, advantages, sequences, settings, GRPO))
    return values, gradient_of(model)


def gradient_of(model: PolicyModel) -> Tensor:
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])
