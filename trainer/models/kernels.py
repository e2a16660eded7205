"""Whether a model can compute attention by blocks where it is, found out by a tree of some tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from trainer.compiling import why_not
from trainer.config import Packing, Precision

if TYPE_CHECKING:
    from trainer.models.huggingface import PolicyModel
    from trainer.models.value import ValueModel

_TOLERANCE = {Precision.FLOAT32: 1e-3, Precision.BFLOAT16: 0.1}
"""Of the distance to the hidden states under a whole mask, in their norm."""


def take_blocks(model: PolicyModel | ValueModel) -> str | None:
    """From now on it does; or the model is as it was, and this is why it cannot.

    It is tried forward and, where something learns, backward: what is missing may be a place in the model for a mask
    that is no tensor, and on CUDA a compiler, or a kernel for the width of the model's heads.
    """
    if Packing.TREE not in model.packings:
        return "the model does not take another mask than its own"
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
            obstacle = f"its results are others than under a whole mask (by {gap:.2g} of their norm)"
    except Exception as error:  # noqa: BLE001 - of compilers, drivers and models: the caller tells it
        obstacle = why_not(error)
    model.zero_grad(set_to_none=True)
    model.by_blocks = obstacle is None
    return obstacle


def _a_tree(device: torch.device, vocabulary: int) -> tuple[Tensor, Tensor, Tensor]:
    """Ids, positions and reach of a prefix of 180 tokens with three branches of 60."""
    place_T = torch.arange(360, device=device)
    branch_T = (place_T - 180) // 60
    ids_T = torch.where(branch_T < 0, 1 + place_T % 3, 4 + branch_T) % vocabulary
    positions_T = torch.where(branch_T < 0, place_T, 180 + (place_T - 180) % 60)
    reach_T = torch.where(branch_T < 0, 360, 240 + 60 * branch_T)
    return ids_T[None], positions_T[None], reach_T[None]
