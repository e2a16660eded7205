"""AdamW over a model's parameters, its schedule, and the bound of its gradient."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn

from trainer.config import OptimizerSettings
from trainer.parallel.tensor import by_mesh, total_norm


def adamw(parameters: Sequence[nn.Parameter], settings: OptimizerSettings) -> torch.optim.AdamW:
    return torch.optim.AdamW(
        [{"params": group} for group in by_mesh(parameters)],
        lr=settings.learning_rate,
        betas=settings.betas,
        eps=settings.eps,
        weight_decay=settings.weight_decay,
        fused=True,
    )


def learning_rate_at(step: int, settings: OptimizerSettings) -> float:
    """The rate of the step with this number, counted from 0: linear from 1/warmup_steps of it to the whole."""
    return settings.learning_rate * min(1.0, (step + 1) / max(1, settings.warmup_steps))


def step_at(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    optimizer.step()


def clip_gradients(parameters: Sequence[nn.Parameter], bound: float, norm: float | None = None) -> float:
    """Scales the gradient down to the norm bound; its norm before. Left alone where that is not finite. `norm` is
    given where these are not all that it is the norm of."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = total_norm(gradients) if norm is None else norm
    if math.isfinite(norm) and norm > bound:
        for group in by_mesh(gradients):
            torch._foreach_mul_(group, bound / (norm + 1e-6))
    return norm
