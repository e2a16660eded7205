"""What the tokens of a row see of each other, and attention under it: under a mask of T × T, or by those blocks of it
in which something is seen.

A row is a forest in preorder (`batching/tree.py`): token i sees token j where j ≤ i < reach[j], and itself. On CUDA
flex_attention goes through the blocks. It has no backward pass on a CPU: there SDPA does, several blocks at a time.

Axes: B rows, T tokens, S blocks of tokens, Q queries, H heads, K width of a head, or keys.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import cache
from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from trainer.compiling import compiled

BLOCK = 128
"""Tokens of a block, flex_attention's own choice. Rows are filled up to whole blocks, so that its kernel is compiled
for few kinds of shapes."""

_KERNEL = {"BACKEND": "TRITON", "IS_DIVISIBLE": True}
"""flex_attention's. Compiled for any number of tokens it cannot know that they fill whole blocks, and would ask at
every load whether it is still within them."""


def tree_mask(reach_BT: Tensor, dtype: torch.dtype) -> Tensor:
    """`tree_sight` as an additive mask, shape (B, 1, T, T): 0 or −∞.

    In the type of the queries: of booleans, attention would make and keep such a tensor in every layer.
    """
    seen_BTT = tree_sight(reach_BT)
    mask_BTT = torch.zeros(seen_BTT.shape, dtype=dtype, device=reach_BT.device)
    return mask_BTT.masked_fill_(~seen_BTT, -math.inf)[:, None]


def tree_sight(reach_BT: Tensor) -> Tensor:
    """Whether token i sees token j, at [row, i, j]: where j ≤ i < reach[j], and itself."""
    place_T = torch.arange(reach_BT.shape[1], device=reach_BT.device)
    ahead_TT = place_T[:, None] - place_T
    return ((ahead_TT >= 0) & (place_T[:, None] < reach_BT[:, None, :])) | (ahead_TT == 0)


def sequence_reach(position_ids_BT: Tensor) -> Tensor:
    """The reach of tokens in rows of sequences one behind the other: where their own ends. One begins where the
    position is not the one before plus one."""
    tokens = position_ids_BT.shape[1]
    begins_BT = functional.pad(position_ids_BT[:, 1:] != position_ids_BT[:, :-1] + 1, (0, 1), value=True)
    place_T = torch.arange(1, tokens + 1, device=position_ids_BT.device)
    end_BT = torch.where(begins_BT, place_T, tokens)
    return end_BT.flip(1).cummin(1).values.flip(1)


def of_packed_rows(device: torch.device) -> bool:
    """Whether masks of packed rows are made of blocks as well as those of trees. On a CPU steps of packed rows stay
    as they were always made, bit for bit."""
    return device.type == "cuda"


class Segment(NamedTuple):
    """Queries from `first` to `last`, the blocks of keys that some of them see, and what hides the others: a mask to
    add, or None where each sees all before it."""

    first: int
    last: int
    blocks: tuple[int, ...]
    mask_B1QK: Tensor | None


class SegmentedMask(BlockMask):
    """A block mask that SDPA can go through. Of rows as they are, not filled up."""

    reach_BT: Tensor
    _made: dict[torch.dtype, tuple[Segment, ...]]

    def segments(self, dtype: torch.dtype) -> tuple[Segment, ...]:
        """For queries of this type; made once, for all layers."""
        if dtype not in self._made:
            self._made[dtype] = tuple(_segments(self.reach_BT, dtype))
        return self._made[dtype]


def block_mask(reach_BT: Tensor) -> BlockMask:
    """`tree_sight` by blocks, of rows filled up to whole ones, without a tensor of T × T anywhere.

    In preorder what a block of tokens is seen by is the blocks from itself on, up to its farthest reach; and wholly
    those behind it, up to its nearest.
    """
    given_BT, kind = reach_BT, BlockMask if reach_BT.is_cuda else SegmentedMask
    rows, tokens = reach_BT.shape
    blocks = -(-tokens // BLOCK)
    place_T = torch.arange(blocks * BLOCK, device=reach_BT.device)
    reach_BT = functional.pad(reach_BT, (0, blocks * BLOCK - tokens)).maximum(place_T + 1)

    def seen(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query < reach_BT[row, key])

    reach_BSK = reach_BT.view(rows, blocks, BLOCK)
    block_S = torch.arange(blocks, device=reach_BT.device)
    behind_SS = block_S[:, None] - block_S
    farthest_B1S, nearest_B1S = reach_BSK.amax(-1)[:, None], reach_BSK.amin(-1)[:, None]
    some_BSS = (behind_SS >= 0) & (block_S[:, None] * BLOCK < farthest_B1S)
    all_BSS = (behind_SS > 0) & ((block_S[:, None] + 1) * BLOCK <= nearest_B1S)
    mask = kind.from_kv_blocks(
        *_listed(some_BSS & ~all_BSS),
        *_listed(all_BSS),
        BLOCK_SIZE=BLOCK,
        mask_mod=seen,
        seq_lengths=(blocks * BLOCK, blocks * BLOCK),
    )
    if isinstance(mask, SegmentedMask):
        mask.reach_BT, mask._made = given_BT, {}
    return mask


def attend_by_blocks(
    q_BHTK: Tensor, k_BHTK: Tensor, v_BHTK: Tensor, mask: BlockMask, scale: float | None = None
) -> Tensor:
    """Attention of H query heads to as many heads of keys and values or to a divisor of that, in the type of the
    values: autocast does not do it for flex_attention. Shape BHTK."""
    q_BHTK, k_BHTK = q_BHTK.to(v_BHTK.dtype), k_BHTK.to(v_BHTK.dtype)
    if isinstance(mask, SegmentedMask):
        return _by_sdpa(q_BHTK, k_BHTK, v_BHTK, mask, scale)
    return _by_flex(q_BHTK, k_BHTK, v_BHTK, mask, scale)


def _by_sdpa(q_BHTK: Tensor, k_BHTK: Tensor, v_BHTK: Tensor, mask: SegmentedMask, scale: float | None) -> Tensor:
    """Keys and values are split into blocks once, so that their gradient is put together once."""
    groups = q_BHTK.shape[1] // k_BHTK.shape[1]
    k_BHTK, v_BHTK = (each.repeat_interleave(groups, dim=1) for each in (k_BHTK, v_BHTK))
    segments = mask.segments(q_BHTK.dtype)
    queries = torch.split(q_BHTK, [segment.last - segment.first for segment in segments], dim=2)
    keys, values = torch.split(k_BHTK, BLOCK, dim=2), torch.split(v_BHTK, BLOCK, dim=2)
    seen = [
        functional.scaled_dot_product_attention(
            q_BHQK,
            torch.cat([keys[block] for block in segment.blocks], dim=2),
            torch.cat([values[block] for block in segment.blocks], dim=2),
            attn_mask=segment.mask_B1QK,
            is_causal=segment.mask_B1QK is None,
            scale=scale,
        )
        for q_BHQK, segment in zip(queries, segments, strict=True)
    ]
    return torch.cat(seen, dim=2)


def _segments(reach_BT: Tensor, dtype: torch.dtype) -> Iterator[Segment]:
    """What all rows begin with and sees all before it, if that is blocks; then a block of queries at a time. Rows of
    two blocks are one."""
    tokens = reach_BT.shape[1]
    size = tokens if tokens <= 2 * BLOCK else BLOCK
    place_T = torch.arange(tokens, device=reach_BT.device)
    reach_BT = reach_BT.maximum(place_T + 1)
    nearest = [int(part.amin()) for part in torch.split(reach_BT, BLOCK, dim=1)]
    farthest = [int(part.amax()) for part in torch.split(reach_BT, BLOCK, dim=1)]
    whole = 0
    while whole < tokens // BLOCK and min(nearest[: whole + 1]) >= (whole + 1) * BLOCK:
        whole += 1
    first = whole * BLOCK
    if first:
        yield Segment(0, first, tuple(range(whole)), None)
    while first < tokens:
        last = min(tokens, first + size)
        blocks = tuple(block for block in range(-(-last // BLOCK)) if farthest[block] > first)
        key_K = torch.cat([place_T[block * BLOCK : (block + 1) * BLOCK] for block in blocks])
        query_Q1 = place_T[first:last, None]
        seen_BQK = (key_K <= query_Q1) & (query_Q1 < reach_BT[:, None, key_K])
        mask_BQK = torch.zeros(seen_BQK.shape, dtype=dtype, device=reach_BT.device).masked_fill_(~seen_BQK, -math.inf)
        yield Segment(first, last, blocks, mask_BQK[:, None])
        first = last


def _by_flex(q_BHTK: Tensor, k_BHTK: Tensor, v_BHTK: Tensor, mask: BlockMask, scale: float | None) -> Tensor:
    tokens = q_BHTK.shape[2]
    if lacking := mask.shape[-1] - tokens:
        q_BHTK, k_BHTK, v_BHTK = (functional.pad(each, (0, 0, 0, lacking)) for each in (q_BHTK, k_BHTK, v_BHTK))
    seen_BHTK = _kernel()(
        q_BHTK,
        k_BHTK,
        v_BHTK,
        block_mask=mask,
        scale=scale,
        enable_gqa=q_BHTK.shape[1] != k_BHTK.shape[1],
        kernel_options=_KERNEL if q_BHTK.is_cuda else None,
    )
    return seen_BHTK[:, :, :tokens]


def _kernel() -> Callable[..., Tensor]:
    """Compiled, as it is meant to be; where all around it is being compiled, that does it."""
    return cast("Callable[..., Tensor]", flex_attention) if torch.compiler.is_compiling() else _compiled()


@cache
def _compiled() -> Callable[..., Tensor]:
    return cast("Callable[..., Tensor]", compiled(flex_attention))


def _listed(blocks_BSS: Tensor) -> tuple[Tensor, Tensor]:
    """Of each block of queries, how many blocks of keys, and those first of all. Shapes (B, 1, S), (B, 1, S, S)."""
    count_BS = blocks_BSS.sum(-1, dtype=torch.int32)
    order_BSS = blocks_BSS.int().argsort(dim=-1, descending=True, stable=True).int()
    return count_BS[:, None], order_BSS[:, None]
