"""Tensors that may be sharded over the ranks: gathered whole, and cut again."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

NamedWeights = Iterable[tuple[str, nn.Parameter]]


def whole(tensor: Tensor) -> Tensor:
    """The whole of a tensor that may be sharded. A collective: every rank must call it, in the same order."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def like(tensor: Tensor, reference: Tensor) -> Tensor:
    """A whole tensor in the dtype, on the device and with the sharding of another one of its shape."""
    tensor = tensor.to(reference.device, reference.dtype)
    if isinstance(reference, DTensor):
        return distribute_tensor(tensor, reference.device_mesh, reference.placements, src_data_rank=None)
    return tensor
