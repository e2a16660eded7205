"""Two uses of the policy's entropy at each token: a bonus in the loss, and a choice of the tokens to learn from.

Axes: N trained tokens. Entropies are in nats, of the distribution at the temperature that the token was sampled at.
"""

from __future__ import annotations

import math

from torch import Tensor

ROUNDING = 1e-4
"""Entropies in nats that differ by less count as equal. Tokens that follow the same text, for example the first ones
of a group's answers, have the same entropy, but every layout of rows rounds it differently: without a tolerance the
layout would decide which of them are trained."""


def entropy_loss(entropy_N: Tensor, share_N: Tensor, coefficient: float) -> Tensor:
    """Return −coefficient · Σ share · H, a scalar: minimising it keeps the policy exploring (Williams & Peng 1991;
    Mnih et al. 2016, A3C). `entropy_N` carries the gradient; a token to ignore has the share 0."""
    return -coefficient * (share_N * entropy_N).sum()


def high_entropy_threshold(entropy_N: Tensor, share: float) -> float:
    """Return the lowest entropy of the top `share` of N tokens, 0 < share ≤ 1 ("Beyond the 80/20 Rule", Wang et al.
    2025: a few tokens of high entropy fork the reasoning, and only these are used in the policy gradient).

    It is the ⌈share · N⌉-th highest of `entropy_N`, the entropies of the whole batch, minus `ROUNDING`, so that
    tokens that equal it are included. −∞ for a batch without tokens.
    """
    count = entropy_N.numel()
    if count == 0:
        return -math.inf
    # Round before the ceiling: 0.2 · 15 is 3.0000000000000004 in binary, and its ceiling would be 4.
    top = max(1, math.ceil(round(share * count, 9)))
    return entropy_N.topk(top).values[-1].item() - ROUNDING
