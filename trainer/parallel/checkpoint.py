"""Optimiser state by parameter name, whole, so that it can be restored under any number of ranks."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from trainer.errors import WeightsUnusable
from trainer.parallel.tensor import NamedWeights, like, whole

OptimizerState = dict[str, dict[str, Tensor]]


def capture_optimizer(weights: NamedWeights, optimizer: torch.optim.Optimizer, *, keep: bool) -> OptimizerState:
    """Copies of the state of every parameter that has been stepped. A collective; only ranks with `keep` hold it."""
    captured: OptimizerState = {}
    for name, parameter in weights:
        for key, value in optimizer.state.get(parameter, {}).items():
            tensor = whole(value)
            if keep:
                captured.setdefault(name, {})[key] = tensor.detach().to("cpu", copy=True)
    return captured


def restore_optimizer(
    weights: NamedWeights, optimizer: torch.optim.Optimizer, state: Mapping[str, Mapping[str, Tensor]]
) -> None:
    """Replaces the optimiser's state by a captured one; an empty one makes it as new.

    Raises WeightsUnusable for state of a parameter that the model does not have, or of another shape.
    """
    parameters = dict(weights)
    strangers = sorted(set(state) - set(parameters))
    if strangers:
        raise WeightsUnusable(f"the optimiser state knows {strangers[0]}, which the model does not have")
    optimizer.state.clear()
    for name, values in state.items():
        parameter = parameters[name]
        restored: dict[str, Tensor] = {}
        for key, value in values.items():
            if value.dim() == 0:
                restored[key] = value.to(parameter.device, copy=True)
            elif value.shape == parameter.shape:
                restored[key] = like(value, parameter).clone()
            else:
                raise WeightsUnusable(f"the optimiser's {key} of {name} has shape {tuple(value.shape)}")
        optimizer.state[parameter] = restored
