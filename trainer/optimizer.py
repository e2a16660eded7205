"""AdamW over a model's parameters, its learning-rate schedule and gradient clipping."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import nn

from trainer.config import LearningRate, OptimizerSettings
from trainer.parallel.tensor import by_mesh, total_norm


class Trained(Protocol):
    """A model, or an adapter over one."""

    def parameters(self) -> Iterator[nn.Parameter]: ...


def adamw(model: Trained, settings: OptimizerSettings) -> torch.optim.AdamW:
    """Return a new AdamW over a model's parameters, some of which have no weight decay (`decays`).

    Parameters without a gradient, such as those of an adapter that is not active, stay as they are.
    The optimiser's state is kept by the names of parameters (`parallel/checkpoint.py`), so its groups may change
    between a state that was written and the trainer that reads it.
    """
    parameters = list(model.parameters())
    embeddings = _embeddings(model)
    groups = [
        {"params": group, "weight_decay": weight_decay}
        for weight_decay, decayed in ((settings.weight_decay, True), (0.0, False))
        for group in by_mesh(each for each in parameters if decays(each, embeddings) is decayed)
    ]
    return torch.optim.AdamW(groups, lr=settings.learning_rate, betas=settings.betas, eps=settings.eps, fused=True)


def decays(parameter: nn.Parameter, embeddings: frozenset[int]) -> bool:
    """Return whether weight decay acts on a parameter: not on norms and biases, which have one dimension, and not on
    `embeddings` (ids of parameters, also those that are the output head's too).

    Decay of a norm or a bias regularises nothing. Most rows of an embedding have no gradient in most batches, and
    decay would shrink them towards zero with nothing against it.
    """
    return parameter.dim() > 1 and id(parameter) not in embeddings


def _embeddings(model: Trained) -> frozenset[int]:
    modules = model.modules() if isinstance(model, nn.Module) else ()
    return frozenset(
        id(parameter)
        for module in modules
        if isinstance(module, nn.Embedding)
        for parameter in module.parameters(recurse=False)
    )


def learning_rate_at(step: int, settings: OptimizerSettings) -> float:
    """Return the learning rate of the step with this number, counted from 0. It depends on the number alone, so a
    resumed trainer continues with the same rates.

    Warm-up: linear, from 1/warmup_steps of the full rate to the full rate. After it: `decayed_share` of the full
    rate.
    """
    warmup = max(1, settings.warmup_steps)
    return settings.learning_rate * min(1.0, (step + 1) / warmup) * decayed_share(step + 1 - warmup, settings)


def decayed_share(step: int, settings: OptimizerSettings) -> float:
    """Return the share of the learning rate at a step, counted from the first step with the full rate.

    It is 1 there and `minimum_share` from `total_steps` on, so each of the `total_steps` steps has a larger share
    than that.
    """
    if settings.schedule is LearningRate.CONSTANT or settings.total_steps is None or step <= 0:
        return 1.0
    steps = max(1, settings.total_steps + 1 - max(1, settings.warmup_steps))
    gone = min(1.0, step / steps)
    left = 1 - gone if settings.schedule is LearningRate.LINEAR else (1 + math.cos(math.pi * gone)) / 2
    return settings.minimum_share + (1 - settings.minimum_share) * left


def step_at(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """Take a step at a learning rate."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    optimizer.step()


def clip_gradients(parameters: Sequence[nn.Parameter], bound: float, norm: float | None = None) -> float:
    """Scale the gradient down to the norm bound, unless its norm is not finite, and return its norm before.

    Pass `norm` when it covers more parameters than `parameters`.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = total_norm(gradients) if norm is None else norm
    if math.isfinite(norm) and norm > bound:
        for group in by_mesh(gradients):
            torch._foreach_mul_(group, bound / (norm + 1e-6))
    return norm
