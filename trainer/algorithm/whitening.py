"""Normalisation of advantages over all tokens of a batch (REINFORCE++, Hu et al. 2025): pure.

Axes: N tokens.
"""

from __future__ import annotations

from torch import Tensor


def whitened(advantages_N: Tensor, counted_N: Tensor) -> Tensor:
    """Centre the counted tokens on their mean and divide them by their population standard deviation, in float64.

    Tokens that do not count keep what they have, as they would otherwise get an advantage from nothing. Equal
    advantages become exactly 0: the mean is taken from the lowest one, so that rounding invents no difference.
    """
    advantages_N = advantages_N.double()
    counted_M = advantages_N[counted_N]
    if not counted_M.numel():
        return advantages_N
    above_M = counted_M - counted_M.min()
    centred_M = above_M - above_M.mean()
    deviation = centred_M.square().mean().sqrt()
    return advantages_N.masked_scatter(counted_N, centred_M / deviation if deviation > 0 else centred_M)
