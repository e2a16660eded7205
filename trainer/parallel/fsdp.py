"""Parameters, gradients and optimiser state sharded over the ranks (FSDP2)."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard

from trainer.parallel.mesh import Ranks


def shard(model: nn.Module, layers: Iterable[nn.Module], ranks: Ranks, *, offload: bool = False) -> None:
    """Shard the model in place. Each layer is a unit of its own; the root gathers all other parameters.

    With `offload` the shards, their gradients and therefore the optimiser's state are in CPU memory. Gradients are
    summed over the ranks, not averaged: the loss already has the batch's global denominator.
    """
    mesh = ranks.mesh(shard=ranks.size)
    policy = CPUOffloadPolicy(pin_memory=ranks.device.type == "cuda") if offload else OffloadPolicy()
    for layer in layers:
        fully_shard(layer, mesh=mesh, offload_policy=policy)
    # The root would stay gathered after a forward pass that no backward follows, and the next one would run on the
    # weights from before the optimiser's step.
    fully_shard(model, mesh=mesh, reshard_after_forward=True, offload_policy=policy)
    sum_gradients(model, ranks.layout.copy)


def sum_gradients(model: nn.Module, copies: int = 1) -> None:
    """Make FSDP sum the gradients of a sharded model instead of averaging them.

    `copies` ranks compute the same gradient, so the sum is divided by it.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(float(copies))
            # gloo has no pre-multiplied sum, which a divide factor would otherwise use.
            module.set_force_sum_reduction_for_comms(True)
