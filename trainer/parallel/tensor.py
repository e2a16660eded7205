"""Tensors that may be sharded over the ranks: gathered whole, and cut again."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TypeVar

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

NamedWeights = Iterable[tuple[str, nn.Parameter]]

_Tensor = TypeVar("_Tensor", bound=Tensor)


def by_mesh(tensors: Iterable[_Tensor]) -> list[list[_Tensor]]:
    """Group tensors by the mesh that they are sharded over: torch's operations on lists take one mesh."""
    groups: dict[object, list[_Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.device_mesh if isinstance(tensor, DTensor) else None, []).append(tensor)
    return list(groups.values())


def total_norm(tensors: Iterable[Tensor]) -> float:
    """Return the Euclidean norm over all tensors. A collective."""
    return math.hypot(*(float(whole(nn.utils.get_total_norm(group)).item()) for group in by_mesh(tensors)))


def whole(tensor: Tensor) -> Tensor:
    """Gather a tensor that may be sharded. A collective: every rank must call it, in the same order."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor that may be sharded, without a copy."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_region(tensor: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """Return this rank's part of a tensor that may be sharded, without a copy, and where it begins in the whole one:
    an index for each dimension."""
    if not isinstance(tensor, DTensor):
        return tensor, (0,) * tensor.dim()
    _, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tensor.to_local(), tuple(offsets)


def like(tensor: Tensor, reference: Tensor) -> Tensor:
    """Return the tensor with the dtype, device and sharding of `reference`, which has the same shape. A collective if
    their shardings differ."""
    if isinstance(tensor, DTensor) and not _is_divided_as(tensor, reference):
        tensor = tensor.full_tensor()
    tensor = tensor.to(reference.device, reference.dtype)
    if isinstance(tensor, DTensor):
        return tensor
    if isinstance(reference, DTensor):
        shards = distribute_tensor(tensor, reference.device_mesh, reference.placements, src_data_rank=None)
        return shards.to(reference.device)  # offloaded shards are on the CPU, not on the mesh's device
    return tensor


def _is_divided_as(tensor: DTensor, reference: Tensor) -> bool:
    return isinstance(reference, DTensor) and (tensor.device_mesh, tensor.placements) == (
        reference.device_mesh,
        reference.placements,
    )
