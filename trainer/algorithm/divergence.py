"""Estimates, per token, of the divergence KL(policy ‖ reference) (Schulman 2020).

Axes: N trained tokens, in the order of their answers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.config import Divergence


def divergence(form: Divergence, logprobs_N: Tensor, reference_N: Tensor) -> Tensor:
    """Estimate the divergence at tokens that the policy drew. With δ = logp − ref:

    - k1 = δ: no bias, and often negative. As a part of the reward its policy gradient is that of KL(π ‖ ref); in the
      loss its gradient is zero on average.
    - k2 = δ²/2: in the loss, its gradient is that of KL(π ‖ ref).
    - k3 = exp(−δ) − 1 + δ: no bias, and never negative. In the loss, its gradient is that of KL(ref ‖ π); in the
      reward it would drive the policy away from where both divergences are large.
    """
    difference_N = logprobs_N - reference_N
    if form is Divergence.K1:
        return difference_N
    if form is Divergence.K2:
        return difference_N.square() / 2
    return torch.expm1(-difference_N) + difference_N


def still_to_come(values_N: Tensor, answer_N: Tensor) -> Tensor:
    """Return for each token the sum over itself and all later tokens of its answer. `answer_N` counts up from 0."""
    if not values_N.numel():
        return values_N
    suffix_N = values_N.flip(0).cumsum(0).flip(0)
    beyond_N = torch.cat([suffix_N, suffix_N.new_zeros(1)])
    ends_A = torch.bincount(answer_N).cumsum(0)
    return suffix_N - beyond_N[ends_A[answer_N]]
