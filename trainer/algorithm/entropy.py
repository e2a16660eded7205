"""Two uses of the policy's entropy at each token: a bonus in the loss, and a choice of the tokens to learn from.

Axes: N trained tokens. Entropies are in nats, of the distribution at the temperature that the token was sampled at.
"""

from __future__ import annotations

import math

from torch import Tensor

ROUNDING = 1e-4
"""Entropies in nats that differ by less count as equal. Tokens behind one and the same text, the first ones of a
group's answers for example, have one entropy, but each layout of rows rounds it differently: without the tolerance
the layout would decide which of them are learnt from."""


def entropy_loss(entropy_N: Tensor, share_N: Tensor, coefficient: float) -> Tensor:
    """−coefficient · Σ share · H, a scalar: minimising it keeps the policy exploring (Williams & Peng 1991; Mnih et
    al. 2016, A3C). `entropy_N` carries the gradient; a token that takes no part has the share 0."""
    return -coefficient * (share_N * entropy_N).sum()


def high_entropy_threshold(entropy_N: Tensor, share: float) -> float:
    """The entropy from which on a token belongs to the top `share` of N, 0 < share ≤ 1 ("Beyond the 80/20 Rule", Wang
    et al. 2025: a few tokens of high entropy fork the reasoning, and only these take part in the policy gradient).

    The ⌈share · N⌉-th highest of `entropy_N`, which are those of the whole batch, less `ROUNDING`: tokens that equal
    it belong as well. −∞ for a batch without tokens.
    """
    count = entropy_N.numel()
    if count == 0:
        return -math.inf
    # Rounded first: 0.2 · 15 is 3.0000000000000004, and its ceiling would be 4.
    top = max(1, math.ceil(round(share * count, 9)))
    return entropy_N.topk(top).values[-1].item() - ROUNDING
