"""Masks of rows that hold several sequences or trees, and attention under them.

A row is a forest in preorder (`batching/tree.py`): token i sees token j if j ≤ i < reach[j], and itself. A mask is
either a whole tensor of T × T, or a list of the blocks in which some token sees another. On CUDA flex_attention
computes the blocks. It has no backward pass on a CPU, where SDPA computes several blocks at a time instead.

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
"""Tokens in a block, flex_attention's default. Rows are padded to whole blocks, so that its kernel is compiled for
few shapes."""

# Options of flex_attention's kernel. A kernel compiled for any number of tokens cannot derive that rows are whole
# blocks; without `IS_DIVISIBLE` it would check the bounds at every load.
_KERNEL = {"BACKEND": "TRITON", "IS_DIVISIBLE": True}


def tree_mask(reach_BT: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `tree_sight` as an additive mask of 0 and −∞, shape (B, 1, T, T).

    `dtype` is that of the queries. The mask is made once for all layers: given a boolean mask, attention would make
    and retain this tensor in every layer.
    """
    seen_BTT = tree_sight(reach_BT)
    mask_BTT = torch.zeros(seen_BTT.shape, dtype=dtype, device=reach_BT.device)
    return mask_BTT.masked_fill_(~seen_BTT, -math.inf)[:, None]


def tree_sight(reach_BT: Tensor) -> Tensor:
    """Return a boolean BTT: at [row, i, j], whether token i sees token j (j ≤ i < reach[j], and itself)."""
    place_T = torch.arange(reach_BT.shape[1], device=reach_BT.device)
    ahead_TT = place_T[:, None] - place_T
    return ((ahead_TT >= 0) & (place_T[:, None] < reach_BT[:, None, :])) | (ahead_TT == 0)


def sequence_reach(position_ids_BT: Tensor) -> Tensor:
    """Return the reach of tokens in packed rows, BT: the end of each token's own sequence.

    A sequence begins where a position is not its predecessor plus one.
    """
    tokens = position_ids_BT.shape[1]
    begins_BT = functional.pad(position_ids_BT[:, 1:] != position_ids_BT[:, :-1] + 1, (0, 1), value=True)
    place_T = torch.arange(1, tokens + 1, device=position_ids_BT.device)
    end_BT = torch.where(begins_BT, place_T, tokens)
    return end_BT.flip(1).cummin(1).values.flip(1)


def of_packed_rows(device: torch.device) -> bool:
    """Whether packed rows use block masks, as trees do. On a CPU they use whole masks, which keeps steps of earlier
    versions reproducible bit for bit."""
    return device.type == "cuda"


class Segment(NamedTuple):
    """The queries from `first` to `last`, and the blocks of keys that some of them see.

    `mask_B1QK` is added to hide keys from queries; None if every query sees all keys before it.
    """

    first: int
    last: int
    blocks: tuple[int, ...]
    mask_B1QK: Tensor | None


class SegmentedMask(BlockMask):
    """A block mask for SDPA on a CPU. It covers the rows without padding."""

    reach_BT: Tensor
    _made: dict[torch.dtype, tuple[Segment, ...]]

    def segments(self, dtype: torch.dtype) -> tuple[Segment, ...]:
        """Return the segments for queries of this dtype. Cached, because all layers use the same ones."""
        if dtype not in self._made:
            self._made[dtype] = tuple(_segments(self.reach_BT, dtype))
        return self._made[dtype]


def block_mask(reach_BT: Tensor) -> BlockMask:
    """Return `tree_sight` as blocks, of rows padded to whole blocks, without ever making a tensor of T × T.

    In preorder, the tokens of a block are seen by the blocks from itself to its farthest reach, and seen as a whole
    by the later blocks up to its nearest reach.
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
    """Compute attention of H query heads under a block mask; H is a multiple of the number of key heads. Shape BHTK.

    Queries and keys are cast to the dtype of the values, because autocast does not cover flex_attention.
    """
    q_BHTK, k_BHTK = q_BHTK.to(v_BHTK.dtype), k_BHTK.to(v_BHTK.dtype)
    if isinstance(mask, SegmentedMask):
        return attend_with_sdpa(q_BHTK, k_BHTK, v_BHTK, mask, scale)
    return attend_with_flex(q_BHTK, k_BHTK, v_BHTK, mask, scale)


def attend_with_sdpa(
    q_BHTK: Tensor, k_BHTK: Tensor, v_BHTK: Tensor, mask: SegmentedMask, scale: float | None
) -> Tensor:
    """Compute attention segment by segment. Keys and values are split into blocks once, which makes their gradient
    one concatenation instead of one sum per segment."""
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
    """Yield one segment for the leading blocks in which all rows are purely causal, if any, and then one per block of
    queries. Rows of at most two blocks are a single segment."""
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


def attend_with_flex(q_BHTK: Tensor, k_BHTK: Tensor, v_BHTK: Tensor, mask: BlockMask, scale: float | None) -> Tensor:
    tokens = q_BHTK.shape[2]
    if lacking := mask.shape[-1] - tokens:
        q_BHTK, k_BHTK, v_BHTK = (functional.pad(each, (0, 0, 0, lacking)) for each in (q_BHTK, k_BHTK, v_BHTK))
    seen_BHTK = flex_kernel()(
        q_BHTK,
        k_BHTK,
        v_BHTK,
        block_mask=mask,
        scale=scale,
        enable_gqa=q_BHTK.shape[1] != k_BHTK.shape[1],
        kernel_options=_KERNEL if q_BHTK.is_cuda else None,
    )
    return seen_BHTK[:, :, :tokens]


def flex_kernel() -> Callable[..., Tensor]:
    """Return flex_attention compiled; within a function that is being compiled, as it is."""
    return cast("Callable[..., Tensor]", flex_attention) if torch.compiler.is_compiling() else _compiled()


@cache
def _compiled() -> Callable[..., Tensor]:
    return cast("Callable[..., Tensor]", compiled(flex_attention))


def _listed(blocks_BSS: Tensor) -> tuple[Tensor, Tensor]:
    """Return, for each block of queries, the number of its key blocks and all key blocks with these first. Shapes
    (B, 1, S) and (B, 1, S, S)."""
    count_BS = blocks_BSS.sum(-1, dtype=torch.int32)
    order_BSS = blocks_BSS.int().argsort(dim=-1, descending=True, stable=True).int()
    return count_BS[:, None], order_BSS[:, None]
