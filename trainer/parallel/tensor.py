"""Tensors that may be sharded over the ranks: gathered whole, and cut again."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TypeVar

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

NamedWeights = Iterable[tuple[str, nn.Parameter]]

_Tensor = TypeVar("_Tensor", bound=Tensor)


def by_mesh(tensors: Iterable[_Tensor]) -> list[list[_Tensor]]:
    """Those that are sharded over the same mesh together: operations on a list know one mesh."""
    groups: dict[object, list[_Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.device_mesh if isinstance(tensor, DTensor) else None, []).append(tensor)
    return list(groups.values())


def total_norm(tensors: Iterable[Tensor]) -> float:
    """The Euclidean norm of all of them. A collective."""
    return math.hypot(*(float(whole(nn.utils.get_total_norm(group)).item()) for group in by_mesh(tensors)))


def whole(tensor: Tensor) -> Tensor:
    """The whole of a tensor that may be sharded. A collective: every rank must call it, in the same order."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def like(tensor: Tensor, reference: Tensor) -> Tensor:
    """A tensor in the dtype, on the device and with the sharding of another one of its shape. A collective where it
    is sharded otherwise."""
    if isinstance(tensor, DTensor) and not _is_divided_as(tensor, reference):
        tensor = tensor.full_tensor()
    tensor = tensor.to(reference.device, reference.dtype)
    if isinstance(tensor, DTensor):
        return tensor
    if isinstance(reference, DTensor):
        shards = distribute_tensor(tensor, reference.device_mesh, reference.placements, src_data_rank=None)
        return shards.to(reference.device)  # which is the CPU's, where they are offloaded from the mesh's device
    return tensor


def _is_divided_as(tensor: DTensor, reference: Tensor) -> bool:
    return isinstance(reference, DTensor) and (tensor.device_mesh, tensor.placements) == (
        reference.device_mesh,
        reference.placements,
    )
