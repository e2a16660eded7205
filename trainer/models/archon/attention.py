"""Grouped-query attention over packed rows, with rotary positions.

Axes: B rows, T tokens, H heads, K width of a head, D hidden.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention.flex_attention import BlockMask

from trainer.models.archon.config import ModelConfig
from trainer.models.archon.norm import RMSNorm
from trainer.models.attention import attend_by_blocks, block_mask, of_packed_rows, sequence_reach, tree_sight
from trainer.parallel.axes import Axes, gather_tokens, heads_to_tokens, local, scatter_tokens, tokens_to_heads


class Positions(NamedTuple):
    """Rotary positions and the mask of all tokens of the rows, also of those on other ranks.

    `balance_M` has the weights of this rank's M tokens in the load-balancing loss of routers; None without that loss.
    """

    cos_BTK: Tensor
    sin_BTK: Tensor
    mask_B1TT: Tensor | BlockMask
    balance_M: Tensor | None = None


def positions_of(
    position_ids_BT: Tensor, config: ModelConfig, reach_BT: Tensor | None = None, *, by_blocks: bool = False
) -> Positions:
    """Return the rotary positions and the mask of rows.

    A sequence begins where a position is not its predecessor plus one, and a token sees its own sequence up to
    itself. With `reach_BT` rows are trees instead. `by_blocks` asks for block masks: for trees, and on CUDA for all
    rows.
    """
    device = position_ids_BT.device
    with torch.autocast(device.type, enabled=False):
        even_K = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=device)
        angles_BTK = position_ids_BT[..., None].float() / config.rope_theta ** (even_K / config.head_dim)
        angles_BTK = torch.cat([angles_BTK, angles_BTK], dim=-1)
    by_blocks = by_blocks and (reach_BT is not None or of_packed_rows(device))
    reach_BT = sequence_reach(position_ids_BT) if reach_BT is None else reach_BT
    mask = block_mask(reach_BT) if by_blocks else tree_sight(reach_BT)[:, None]
    return Positions(angles_BTK.cos(), angles_BTK.sin(), mask)


class Attention(nn.Module):
    """Grouped-query attention. With the axis `tensor` each rank has some of the heads; with `context` each rank
    exchanges its share of the tokens for all tokens of some heads while attention is computed (Ulysses)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.axes = Axes()
        self.head_dim = config.head_dim
        width, kv_width = config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden, width, bias=config.qkv_bias)
        self.k_proj = nn.Linear(config.hidden, kv_width, bias=config.qkv_bias)
        self.v_proj = nn.Linear(config.hidden, kv_width, bias=config.qkv_bias)
        self.o_proj = nn.Linear(width, config.hidden, bias=config.output_bias)
        self.q_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None

    def inputs(self, hidden_BTD: Tensor, cos_BTK: Tensor, sin_BTK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values of all tokens of the rows, BTHK, for this rank's heads."""
        hidden_BTD = gather_tokens(hidden_BTD, self.axes.tensor)
        q_BTHK = self._heads(hidden_BTD, self.q_proj, self.q_norm)
        k_BTHK = self._heads(hidden_BTD, self.k_proj, self.k_norm)
        v_BTHK = self._heads(hidden_BTD, self.v_proj, None)
        context = self.axes.context
        if k_BTHK.shape[2] < context.size:
            copies = context.size // k_BTHK.shape[2]
            k_BTHK, v_BTHK = (each.repeat_interleave(copies, dim=2) for each in (k_BTHK, v_BTHK))
        q_BTHK, k_BTHK, v_BTHK = (tokens_to_heads(each, context) for each in (q_BTHK, k_BTHK, v_BTHK))
        # Cast to the dtype of attention here, where the cast is compiled together with the rotation.
        q_BTHK, k_BTHK = (_rotated(each, cos_BTK, sin_BTK).to(v_BTHK.dtype) for each in (q_BTHK, k_BTHK))
        return q_BTHK, k_BTHK, v_BTHK

    def output(self, seen_BTHK: Tensor) -> Tensor:
        """Project the result of `attend` and return this rank's share of the tokens, BTD."""
        seen_BTHK = heads_to_tokens(seen_BTHK, self.axes.context)
        output_BTD = functional.linear(seen_BTHK.flatten(2), local(self.o_proj.weight))
        output_BTD = scatter_tokens(output_BTD, self.axes.tensor)
        return output_BTD if self.o_proj.bias is None else output_BTD + local(self.o_proj.bias)

    def _heads(self, hidden_BTD: Tensor, projection: nn.Linear, norm: RMSNorm | None) -> Tensor:
        bias = None if projection.bias is None else local(projection.bias)
        flat = functional.linear(hidden_BTD, local(projection.weight), bias)
        heads_BTHK = flat.view(*flat.shape[:2], -1, self.head_dim)
        if norm is not None:
            heads_BTHK = norm(heads_BTHK)
        return heads_BTHK


def _rotated(heads_BTHK: Tensor, cos_BTK: Tensor, sin_BTK: Tensor) -> Tensor:
    first, second = heads_BTHK.chunk(2, dim=-1)
    turned_BTHK = torch.cat([-second, first], dim=-1)
    return heads_BTHK * cos_BTK[:, :, None] + turned_BTHK * sin_BTK[:, :, None]


def attend(q_BTHK: Tensor, k_BTHK: Tensor, v_BTHK: Tensor, mask_B1TT: Tensor | BlockMask) -> Tensor:
    """Compute attention under a tensor mask or a block mask. Shape BTHK."""
    if isinstance(mask_B1TT, BlockMask):
        q_BHTK, k_BHTK, v_BHTK = (each.transpose(1, 2) for each in (q_BTHK, k_BTHK, v_BTHK))
        return attend_by_blocks(q_BHTK, k_BHTK, v_BHTK, mask_B1TT).transpose(1, 2)
    groups = q_BTHK.shape[2] // k_BTHK.shape[2]
    k_BHTK, v_BHTK = (each.repeat_interleave(groups, dim=2).transpose(1, 2) for each in (k_BTHK, v_BTHK))
    seen_BHTK = functional.scaled_dot_product_attention(q_BTHK.transpose(1, 2), k_BHTK, v_BHTK, attn_mask=mask_B1TT)
    return seen_BHTK.transpose(1, 2)
