"""Normalisation of advantages over all tokens of a batch (REINFORCE++, Hu et al. 2025): pure.

Axes: N tokens.
"""

from __future__ import annotations

from torch import Tensor


def whitened(advantages_N: Tensor, counted_N: Tensor) -> Tensor:
    """Centre the counted tokens on their mean and divide them by their population standard deviation, in float64.

    Other tokens are unchanged, because centring would give them an advantage without a reward. Equal advantages
    become exactly 0: deviations are computed from the lowest one, so that rounding creates no difference.
    """
    advantages_N = advantages_N.double()
    counted_M = advantages_N[counted_N]
    if not counted_M.numel():
        return advantages_N
    above_M = counted_M - counted_M.min()
    centred_M = above_M - above_M.mean()
    deviation = centred_M.square().mean().sqrt()
    return advantages_N.masked_scatter(counted_N, centred_M / deviation if deviation > 0 else centred_M)
