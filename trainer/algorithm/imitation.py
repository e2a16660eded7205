"""Losses that make a policy say what somebody else said, or would say.

Axes: N tokens. Sums of token terms, each times its share of the batch.
"""

from __future__ import annotations

import math

from torch import Tensor


def negative_log_likelihood(logprobs_N: Tensor, share_N: Tensor) -> Tensor:
    """Σ share · −logp: supervised fine-tuning."""
    return -(share_N * logprobs_N).sum()


def distillation(
    logprobs_N: Tensor, behaviour_N: Tensor, teacher_N: Tensor, share_N: Tensor, importance_cap: float
) -> Tensor:
    """Σ share · ρ · (logp − teacher) of tokens that the policy drew; ρ = min(exp(logp − behave), importance_cap).

    Its value estimates KL(policy ‖ teacher). Its gradient is Σ share · ρ · (logp − teacher) · ∇logp, that of this
    divergence token by token; through logp − teacher itself it would be zero on average, as that of every k1 in a
    loss is. (On-policy distillation: Agarwal et al. 2024; Gu et al. 2024.)
    """
    ratio_N = (logprobs_N - behaviour_N).clamp(max=math.log(importance_cap)).exp()
    slope_N = (ratio_N * (logprobs_N - teacher_N)).detach()
    one_N = 1 + logprobs_N - logprobs_N.detach()  # with the gradient of the log-probability
    return (share_N * slope_N * one_N).sum()
