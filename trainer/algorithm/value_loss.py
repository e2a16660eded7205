"""The critic's loss, and a measure of its values: pure functions. Axes: N trained tokens."""

from __future__ import annotations

import torch
from torch import Tensor


def value_loss(values_N: Tensor, before_N: Tensor, returns_N: Tensor, share_N: Tensor, clip: float | None) -> Tensor:
    """Return Σ share · ½ · max((V − R)², (V' − R)²), where V' = before + clamp(V − before, −clip, clip).

    `before_N` are the values at the start of the step. A value that moved further than `clip` towards its return has
    no gradient (the authors' implementation of Schulman et al. 2017). Without a clip it is the plain squared error.
    """
    terms_N = (values_N - returns_N).square()
    if clip is not None:
        near_N = before_N + (values_N - before_N).clamp(-clip, clip)
        terms_N = torch.maximum(terms_N, (near_N - returns_N).square())
    return (share_N * terms_N / 2).sum()


def explained_variance(values_N: Tensor, returns_N: Tensor) -> float:
    """Return 1 − Var(R − V) / Var(R): 1 for perfect values, 0 for values no better than a constant, and 0 if the
    returns do not vary."""
    spread = returns_N.double().var(correction=0)
    if not spread > 0:
        return 0.0
    return float(1 - (returns_N.double() - values_N.double()).var(correction=0) / spread)
