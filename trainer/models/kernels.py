"""Try attention by blocks on a model, with a small tree of tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from trainer.compiling import why_not
from trainer.config import Packing, Precision

if TYPE_CHECKING:
    from trainer.models.huggingface import PolicyModel
    from trainer.models.value import ValueModel

# Largest accepted distance from the hidden states under a whole mask, relative to their norm.
_TOLERANCE = {Precision.FLOAT32: 1e-3, Precision.BFLOAT16: 0.1}


def take_blocks(model: PolicyModel | ValueModel) -> str | None:
    """Turn on attention by blocks and return None; or leave the model as it was and return the reason.

    The trial runs forward and, if the model learns, backward. It fails if the model's code accepts tensor masks only,
    and on CUDA without a compiler or without a kernel for the width of the heads.
    """
    if Packing.TREE not in model.packings:
        return "the model does not accept any mask but its own"
    learns = any(parameter.requires_grad for parameter in model.parameters())
    ids_BT, positions_BT, reach_BT = _a_tree(next(model.parameters()).device, model.vocabulary)
    with torch.no_grad():
        wanted_BTD = model.hidden(ids_BT, positions_BT, reach_BT).float()
    obstacle = None
    try:
        model.accept_block_masks()
        model.by_blocks = True
        with torch.set_grad_enabled(learns):
            found_BTD = model.hidden(ids_BT, positions_BT, reach_BT).float()
        if learns:
            torch.autograd.backward(found_BTD.square().mean())
        gap = float((found_BTD.detach() - wanted_BTD).norm() / wanted_BTD.norm())
        if not gap <= _TOLERANCE[model.precision]:
            obstacle = f"its results differ from those under a whole mask by {gap:.2g} of their norm"
    except Exception as error:  # noqa: BLE001 - compilers, drivers and models raise anything; the caller logs the reason
        obstacle = why_not(error)
    model.zero_grad(set_to_none=True)
    model.by_blocks = obstacle is None
    return obstacle


def _a_tree(device: torch.device, vocabulary: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return ids, positions and reach of a prefix of 180 tokens with three branches of 60 each: several blocks."""
    place_T = torch.arange(360, device=device)
    branch_T = (place_T - 180) // 60
    ids_T = torch.where(branch_T < 0, 1 + place_T % 3, 4 + branch_T) % vocabulary
    positions_T = torch.where(branch_T < 0, place_T, 180 + (place_T - 180) % 60)
    reach_T = torch.where(branch_T < 0, 360, 240 + 60 * branch_T)
    return ids_T[None], positions_T[None], reach_T[None]
