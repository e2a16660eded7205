"""The block mask equals the dense one, and models compute the same results under both."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from tests.trainer.dense_kernel import as_on_cuda, dense_kernel, expanded
from tests.trainer.models.archon.shapes import save_random
from tests.trainer.tiny import ALONE, GRPO, trajectory, turn
from trainer.batching.grouping import Batch
from trainer.batching.packing import MicroBatch, pack
from trainer.batching.sequences import linearise
from trainer.batching.tree import tree_row
from trainer.config import BatchSettings, Packing, TrainerSettings
from trainer.errors import ConfigurationError
from trainer.loading import load_critic, load_reference, load_trained
from trainer.models import attention
from trainer.models.attention import SegmentedMask, attend_by_blocks, block_mask, sequence_reach, tree_sight
from trainer.models.huggingface import PolicyModel

lengths = st.lists(st.integers(1, 9), min_size=1, max_size=5)
token_lists = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=14), min_size=1, max_size=9)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "BLOCK", 4)


@given(rows=st.lists(lengths, min_size=1, max_size=3))
def test_the_reach_of_consecutive_sequences_is_their_end(rows: list[list[int]]) -> None:
    width = max(map(sum, rows))
    filled = [[*row, *[1] * (width - sum(row))] for row in rows]
    positions_BT = torch.tensor([[place for length in row for place in range(length)] for row in filled])
    ends = [torch.tensor(row).cumsum(0).tolist() for row in filled]
    wanted = [
        [end for length, end in zip(row, each, strict=True) for _ in range(length)]
        for row, each in zip(filled, ends, strict=True)
    ]
    assert sequence_reach(positions_BT).tolist() == wanted


@pytest.mark.usefixtures("small_blocks")
@settings(max_examples=30)
@given(rows=st.lists(token_lists, min_size=1, max_size=3))
def test_the_block_mask_of_trees_equals_the_dense_one(rows: list[list[list[int]]]) -> None:
    """This includes which blocks it marks as full: those that torch finds by checking every pair."""
    trees = [tree_row(row, sorted(range(len(row)), key=row.__getitem__)) for row in rows]
    width = max(map(len, trees))
    reach_BT = torch.tensor([[*tree.reach, *range(len(tree) + 1, width + 1)] for tree in trees])
    found = block_mask(reach_BT)
    filled_BT = functional.pad(reach_BT, (0, -width % 4))
    wanted_BTT = tree_sight(filled_BT)
    assert torch.equal(expanded(found), wanted_BTT)
    size = filled_BT.shape[1]
    theirs = create_block_mask(lambda row, _, q, kv: wanted_BTT[row, q, kv], len(rows), 1, size, size, "cpu", 4)
    for name in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
        assert torch.equal(getattr(found, name), getattr(theirs, name)), name
    for name in ("kv_indices", "full_kv_indices", "q_indices", "full_q_indices"):
        assert torch.equal(getattr(found, name), getattr(theirs, name)), name


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("tokens", [300, 256, 40])
def test_flex_attention_under_the_block_mask_equals_sdpa_under_the_dense_one(
    tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "_compiled", lambda: flex_attention)
    generator = torch.Generator().manual_seed(0)
    q_BHTK = torch.randn(2, 6, tokens, 16, generator=generator)
    k_BHTK, v_BHTK = torch.randn(2, 2, 2, tokens, 16, generator=generator)
    reach_BT = torch.tensor([a_tree(tokens), [*[tokens // 3] * (tokens // 3), *[tokens] * (tokens - tokens // 3)]])
    found_BHTK = attention.attend_with_flex(q_BHTK, k_BHTK, v_BHTK, block_mask(reach_BT), 0.3)
    k_BHTK, v_BHTK = (each.repeat_interleave(3, dim=1) for each in (k_BHTK, v_BHTK))
    seen_B1TT = tree_sight(reach_BT)[:, None]
    wanted_BHTK = functional.scaled_dot_product_attention(q_BHTK, k_BHTK, v_BHTK, attn_mask=seen_B1TT, scale=0.3)
    torch.testing.assert_close(found_BHTK, wanted_BHTK, atol=1e-5, rtol=1e-5)


def a_tree(tokens: int) -> list[int]:
    """Return the reach of a row whose prefix is half of it, with five branches."""
    branch = tokens // 10
    prefix = [7] * (tokens - 5 * branch)
    return list(tree_row([prefix + [9 + number] * branch for number in range(5)], range(5)).reach)


def a_batch() -> Batch:
    """Return two groups with a prompt of 150 tokens each, whose members branch again."""
    numbers = random.Random(0)

    def ids(count: int) -> list[int]:
        return [numbers.randrange(64) for _ in range(count)]

    members = []
    for _ in range(2):
        prompt = ids(150)
        for _ in range(3):
            turns = [turn(ids(20), prompt=prompt)]
            turns += [turn(ids(12), prompt=ids(4), parent=0, prefix=170) for _ in range(2)]
            members.append(trajectory(*turns))
    return Batch(trajectories=tuple(members), groups=(0, 0, 0, 1, 1, 1), base_version=0)


def micro_batches(packing: Packing) -> list[MicroBatch]:
    batch = a_batch()
    layout = BatchSettings(packing=packing, max_tokens_per_microbatch=800)
    return pack(batch, [[1.0] * 3] * 6, linearise(batch.trajectories), layout, GRPO)


def learnt(model: Any, packing: Packing) -> tuple[Tensor, dict[str, Tensor]]:
    """Return every trained token's log-probability, and the gradient of a sum of them with different weights."""
    model.zero_grad(set_to_none=True)
    values = []
    for each in micro_batches(packing):
        weights_N = torch.linspace(-1, 1, len(each.targets_N))
        if isinstance(model, PolicyModel):
            place = (each.predictor_N, each.targets_N, each.temperature_N)
            found_N = model(each.input_ids_BT, each.position_ids_BT, *place, each.reach_BT)[0]
        else:
            found_N = model(each.input_ids_BT, each.position_ids_BT, each.predictor_N, each.reach_BT)
        torch.autograd.backward((weights_N * found_N).sum())
        values.append(found_N.detach())
    return torch.cat(values), {name: each.grad for name, each in model.named_weights() if each.grad is not None}


def configured(**values: Any) -> TrainerSettings:
    return TrainerSettings.model_validate(values)


CASES = [
    ("fsdp", Packing.TREE, True, "float32"),
    ("fsdp", Packing.TREE, False, "bfloat16"),
    ("archon", Packing.TREE, True, "float32"),
    ("archon", Packing.TREE, False, "bfloat16"),
]
ON_CUDA = [*CASES, ("fsdp", Packing.PACKED, False, "float32"), ("archon", Packing.PACKED, False, "float32")]


@pytest.mark.parametrize(
    ("on_cuda", "backend", "packing", "checkpointing", "precision"),
    [*((False, *case) for case in CASES), *((True, *case) for case in ON_CUDA)],
)
def test_models_compute_the_same_by_blocks(
    on_cuda: bool,
    backend: str,
    packing: Packing,
    checkpointing: bool,
    precision: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if on_cuda:
        as_on_cuda(monkeypatch)
    save_random(tmp_path, "qwen3")
    options = {"backend": backend, "activation_checkpointing": checkpointing, "precision": precision}
    options["batch"] = {"packing": packing}
    whole = load_trained(tmp_path, configured(**options, attention="whole"), ALONE)
    blocks = load_trained(tmp_path, configured(**options), ALONE)
    assert (whole.by_blocks, blocks.by_blocks) == (False, True)
    (wanted_N, wanted), (found_N, found) = learnt(whole, packing), learnt(blocks, packing)
    torch.testing.assert_close(found_N, wanted_N, atol=1e-5 if precision == "float32" else 0.05, rtol=0)
    for name, gradient in wanted.items():
        apart = float((found[name] - gradient).norm() / gradient.norm())
        assert apart < (1e-5 if precision == "float32" else 0.1), name


def test_references_and_critics_compute_by_blocks_too(tiny_model: Path) -> None:
    by_name = {}
    for name in ("whole", "blocks"):
        reference = load_reference(tiny_model, configured(attention=name), ALONE)
        critic = load_critic(tiny_model, configured(attention=name), ALONE)
        assert reference.by_blocks is critic.by_blocks is (name == "blocks")
        with torch.no_grad():
            critic.value_head.weight.copy_(torch.linspace(-1, 1, 32))
            each = micro_batches(Packing.TREE)[0]
            place = (each.predictor_N, each.targets_N, each.temperature_N)
            by_name[name] = (
                reference(each.input_ids_BT, each.position_ids_BT, *place, each.reach_BT)[0],
                critic(each.input_ids_BT, each.position_ids_BT, each.predictor_N, each.reach_BT),
            )
    for found_N, wanted_N in zip(by_name["blocks"], by_name["whole"], strict=True):
        torch.testing.assert_close(found_N, wanted_N, atol=1e-5, rtol=0)


@pytest.mark.usefixtures("small_blocks")
@settings(max_examples=60)
@given(rows=st.lists(token_lists, min_size=1, max_size=3), groups=st.sampled_from([1, 2]))
def test_on_a_cpu_sdpa_computes_by_blocks(rows: list[list[list[int]]], groups: int) -> None:
    trees = [tree_row(row, sorted(range(len(row)), key=row.__getitem__)) for row in rows]
    width = max(map(len, trees))
    reach_BT = torch.tensor([[*tree.reach, *range(len(tree) + 1, width + 1)] for tree in trees])
    generator = torch.Generator().manual_seed(width)
    shapes = [(len(rows), heads, width, 8) for heads in (2 * groups, 2, 2)]
    q, k, v = (torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes)
    weights = torch.randn(shapes[0], generator=generator, dtype=torch.float64)
    found = attend_by_blocks(q, k, v, block_mask(reach_BT), 0.4)
    found_gradients = torch.autograd.grad((found * weights).sum(), [q, k, v])
    wide = [each.repeat_interleave(groups, dim=1) for each in (k, v)]
    wanted = functional.scaled_dot_product_attention(
        q, wide[0], wide[1], attn_mask=tree_sight(reach_BT)[:, None], scale=0.4
    )
    wanted_gradients = torch.autograd.grad((wanted * weights).sum(), [q, k, v])
    for one, other in zip((found, *found_gradients), (wanted, *wanted_gradients), strict=True):
        torch.testing.assert_close(one, other, atol=1e-10, rtol=1e-10)


def test_blocks_that_nothing_sees_are_skipped() -> None:
    """A prompt of 512 tokens with eight answers of 64: the prompt without a mask, then two answers at a time."""
    row = tree_row([[1] * 512 + [2 + number] * 64 for number in range(8)], range(8))
    mask = block_mask(torch.tensor([row.reach]))
    assert isinstance(mask, SegmentedMask)
    segments = mask.segments(torch.float32)
    assert [(segment.first, segment.last, segment.blocks) for segment in segments] == [
        (0, 512, (0, 1, 2, 3)),
        *((128 * block, 128 * block + 128, (0, 1, 2, 3, block)) for block in range(4, 8)),
    ]
    assert [segment.mask_B1QK is None for segment in segments] == [True, False, False, False, False]
    assert mask.segments(torch.float32) is segments, "made once for all layers"


@pytest.mark.filterwarnings("ignore")  # warnings of torch's compiler about its own imports
def test_blocks_are_refused_with_the_reason_if_they_do_not_work(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """flex_attention itself fails on a CPU."""
    monkeypatch.setattr(attention, "attend_with_sdpa", attention.attend_with_flex)
    with pytest.raises(
        ConfigurationError, match=r"trainer\.attention: .* does not support backward on CPU.*use auto or whole"
    ):
        load_trained(tiny_model, configured(attention="blocks"), ALONE)


def wrong(*arguments: Any, **options: Any) -> Tensor:
    return dense_kernel(*arguments, **{**options, "scale": 0.01})


def broken(*arguments: Any, **options: Any) -> Tensor:
    raise RuntimeError("no C compiler\nand a page about it")


@pytest.mark.parametrize(
    ("made", "reason"),
    [(wrong, "results differ from those under a whole mask"), (broken, "RuntimeError: no C compiler$")],
)
def test_whole_masks_are_used_if_blocks_do_not_work(
    made: Callable[..., Tensor], reason: str, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same happens on a GPU whose machine lacks a requirement of the kernel."""
    as_on_cuda(monkeypatch)
    monkeypatch.setattr(attention, "flex_kernel", lambda: made)
    with capture_logs() as logs:
        model = load_trained(tiny_model, configured(), ALONE)
    (log,) = (each for each in logs if each["log_level"] == "warning")
    assert re.search(reason, log["reason"])
    assert model.by_blocks is False
    assert all(parameter.grad is None for parameter in model.parameters())
    plain = load_trained(tiny_model, configured(attention="whole"), ALONE)
    torch.testing.assert_close(learnt(model, Packing.TREE), learnt(plain, Packing.TREE), atol=0, rtol=0)


def test_a_model_with_a_window_keeps_its_own_masks(tmp_path: Path) -> None:
    from transformers import MistralConfig, MistralForCausalLM

    config = MistralConfig(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=32,
        sliding_window=64,
    )
    MistralForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigurationError, match="does not accept any mask but its own"):
        load_trained(tmp_path, configured(attention="blocks"), ALONE)
