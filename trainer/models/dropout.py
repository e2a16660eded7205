"""Passes without dropout, in training as in evaluation.

Reinforcement learning compares log-probabilities of one policy between passes: with those of the engine, of the
reference, and of the weights at the start of a step. Dropout would move each of them at random by tenths of a nat,
which the loss cannot tell from learning.
"""

from __future__ import annotations

from typing import Any, Self

from torch import nn
from torch.nn.modules.dropout import _DropoutNd


class Repeatable(nn.Module):
    """A module whose equal calls give equal results, in training mode too.

    Training mode is set only on the parts that recompute their activations in the backward pass, because transformers
    checkpoints a layer in that mode alone. Everything below them stays in evaluation mode, which also turns off other
    noise, such as the jitter of routers.
    """

    def train(self, mode: bool = True) -> Self:
        super().train(False)
        if mode:
            for module in self.modules():
                module.training = module is self or bool(getattr(module, "gradient_checkpointing", False))
        return self


def remove_dropout(transformer: nn.Module) -> None:
    """Set every dropout rate of a model of transformers to 0: in modules, in their attributes and in configurations,
    of which some are read in every pass.

    Checkpointed layers are in training mode (`Repeatable`), and some of them, as OPT's, drop values themselves.
    """
    configurations: dict[int, Any] = {}
    for module in transformer.modules():
        if isinstance(module, _DropoutNd):
            module.p = 0.0
        _clear_rates(module)
        config = getattr(module, "config", None)
        configurations[id(config)] = config
    for config in configurations.values():
        _clear_rates(config)
        for part in vars(config).values() if hasattr(config, "__dict__") else ():
            _clear_rates(part)


def _clear_rates(owner: Any) -> None:
    """Set the attributes of an object that are dropout rates to 0, such as `resid_pdrop` or `layerdrop`."""
    for name, value in list(vars(owner).items()) if hasattr(owner, "__dict__") else ():
        if "drop" in name and isinstance(value, float):
            setattr(owner, name, 0.0)
