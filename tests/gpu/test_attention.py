"""Compare flex_attention under block masks with SDPA under dense ones, forward and backward."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tests.gpu.device import peak_bytes, relative
from tests.trainer.models.test_attention import a_tree
from trainer.models.attention import attend_by_blocks, block_mask, tree_sight

pytestmark = pytest.mark.gpu

BOUND = {torch.float32: 1e-4, torch.bfloat16: 2e-2}


def drawn(
    device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, tokens: int, width: int
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(2, count, tokens, width, generator=generator).to(device, dtype).requires_grad_()
        for count in (heads, kv_heads, kv_heads)
    ]


def forest(device: torch.device, tokens: int) -> Tensor:
    """Return the reach of a row that is a tree, and of one with three sequences."""
    third = tokens // 3
    packed = [third] * third + [2 * third] * third + [tokens] * (tokens - 2 * third)
    return torch.tensor([a_tree(tokens), packed], device=device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "tokens", "width"),
    [(4, 4, 256, 64), (16, 8, 1000, 128), (6, 2, 300, 24), (4, 1, 40, 16), (2, 2, 640, 256)],
)
def test_blocks_compute_the_same_as_sdpa(
    device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, tokens: int, width: int
) -> None:
    reach_BT = forest(device, tokens)
    q_BHTK, k_BHTK, v_BHTK = drawn(device, dtype, heads, kv_heads, tokens, width)
    weights = torch.randn(q_BHTK.shape, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    found = attend_by_blocks(q_BHTK, k_BHTK, v_BHTK, block_mask(reach_BT))
    found_gradients = torch.autograd.grad((found * weights).sum(), [q_BHTK, k_BHTK, v_BHTK])

    exact = [each.detach().float().requires_grad_() for each in (q_BHTK, k_BHTK, v_BHTK)]
    k, v = (each.repeat_interleave(heads // kv_heads, dim=1) for each in exact[1:])
    wanted = functional.scaled_dot_product_attention(exact[0], k, v, attn_mask=tree_sight(reach_BT)[:, None])
    wanted_gradients = torch.autograd.grad((wanted * weights.float()).sum(), exact)
    assert found.dtype is dtype
    assert relative(found, wanted) < BOUND[dtype]
    for gradient, wanted_gradient in zip(found_gradients, wanted_gradients, strict=True):
        assert relative(gradient, wanted_gradient) < 2 * BOUND[dtype]


def test_after_many_shapes_it_is_still_a_kernel_that_keeps_no_scores(device: torch.device) -> None:
    """Beyond its limit of compilations torch would run the uncompiled function, with tensors of T × T for every
    head."""
    sizes = [130 * number for number in range(1, 13)]
    for tokens in sizes if device.type == "cuda" else sizes[:2]:
        for rows in (1, 2, 3):
            reach_BT = torch.tensor([a_tree(tokens)] * rows, device=device)
            q, k, v = (each[:1].expand(rows, -1, -1, -1) for each in drawn(device, torch.bfloat16, 4, 2, tokens, 64))
            torch.autograd.backward(attend_by_blocks(q, k, v, block_mask(reach_BT)).float().sum())
            with torch.no_grad():
                attend_by_blocks(q, k, v, block_mask(reach_BT))
    tokens = 16384 if device.type == "cuda" else 512
    reach_BT = torch.tensor([a_tree(tokens)], device=device)
    q, k, v = (each[:1] for each in drawn(device, torch.bfloat16, 4, 2, tokens, 64))
    peak = peak_bytes(
        device, lambda: torch.autograd.backward(attend_by_blocks(q, k, v, block_mask(reach_BT)).float().sum())
    )
    assert peak is None or peak < tokens * tokens, "less than a byte for each pair of tokens"
