from __future__ import annotations

import torch
from torch import Tensor, nn

from trainer.parallel.axes import local


class RMSNorm(nn.Module):
    """x / √(mean(x²) + eps) · weight over the last axis, in float32 up to the weight."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, inputs: Tensor) -> Tensor:
        exact = inputs.float()
        exact = exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + self.eps)
        return local(self.weight) * exact.to(inputs.dtype)
