"""A dense implementation of flex_attention with a gradient on a CPU, to test the code around the kernel."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.flex_attention import BlockMask, create_mask

from trainer import loading
from trainer.models import attention, huggingface
from trainer.models.archon import attention as archon


def as_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make attention use the CUDA path, except for the kernel."""
    monkeypatch.setattr(attention, "attend_with_sdpa", attention.attend_with_flex)
    monkeypatch.setattr(attention, "flex_kernel", lambda: dense_kernel)
    for module in (huggingface, archon, loading):
        monkeypatch.setattr(module, "of_packed_rows", lambda device: True)


def dense_kernel(
    q_BHTK: Tensor,
    k_BHTK: Tensor,
    v_BHTK: Tensor,
    *,
    block_mask: BlockMask,
    scale: float | None,
    enable_gqa: bool,
    kernel_options: Any,
) -> Tensor:
    """Compute dense attention with the kernel's strict checks: equal types, explicitly shared heads, a mask as long
    as the rows."""
    assert q_BHTK.dtype == k_BHTK.dtype == v_BHTK.dtype
    assert enable_gqa is (q_BHTK.shape[1] != k_BHTK.shape[1])
    assert block_mask.shape[-2:] == (q_BHTK.shape[2], k_BHTK.shape[2])
    assert block_mask.shape[0] == q_BHTK.shape[0]
    assert kernel_options is None or q_BHTK.is_cuda
    shared = q_BHTK.shape[1] // k_BHTK.shape[1]
    k_BHTK, v_BHTK = (each.repeat_interleave(shared, dim=1) for each in (k_BHTK, v_BHTK))
    return functional.scaled_dot_product_attention(
        q_BHTK, k_BHTK, v_BHTK, attn_mask=expanded(block_mask)[:, None], scale=scale
    )


def expanded(mask: BlockMask) -> Tensor:
    """Return the pairs that the kernel computes, BTT: all pairs of blocks listed as full, those the function allows
    in blocks listed as partial, and no others."""
    rows, _, tokens, _ = mask.shape
    said_BTT = create_mask(mask.mask_mod, rows, 1, tokens, tokens, mask.kv_indices.device.type)[:, 0]
    seen_BTT = torch.zeros_like(said_BTT)
    size, _ = mask.BLOCK_SIZE
    kinds = ((mask.kv_num_blocks, mask.kv_indices, False), (mask.full_kv_num_blocks, mask.full_kv_indices, True))
    for counts, indices, full in kinds:
        assert counts is not None
        assert indices is not None
        for row in range(rows):
            for query in range(counts.shape[-1]):
                for key in indices[row, 0, query, : int(counts[row, 0, query])].tolist():
                    block = (row, slice(query * size, (query + 1) * size), slice(key * size, (key + 1) * size))
                    assert not seen_BTT[block].any(), "a block is listed once"
                    seen_BTT[block] = True if full else said_BTT[block]
    return seen_BTT
