"""Losses that make a policy imitate given answers or a teacher.

Axes: N tokens. Sums of token terms, each times its share of the batch.
"""

from __future__ import annotations

from torch import Tensor


def negative_log_likelihood(logprobs_N: Tensor, share_N: Tensor) -> Tensor:
    """Return Σ share · −logp, the loss of supervised fine-tuning."""
    return -(share_N * logprobs_N).sum()


def distillation(logprobs_N: Tensor, teacher_N: Tensor, share_N: Tensor, weight_N: Tensor) -> Tensor:
    """Return Σ share · w · (logp − teacher) over tokens that the policy drew; `weight_N` is the importance weight
    made of exp(logp − behave) (`algorithm/correction.py`).

    Its value estimates KL(policy ‖ teacher). Its gradient is Σ share · w · (logp − teacher) · ∇logp, that of this
    divergence token by token. A gradient through logp − teacher itself would be zero on average, as that of every k1
    in a loss is. (On-policy distillation: Agarwal et al. 2024; Gu et al. 2024.)
    """
    slope_N = (weight_N * (logprobs_N - teacher_N)).detach()
    one_N = 1 + logprobs_N - logprobs_N.detach()  # with the gradient of the log-probability
    return (share_N * slope_N * one_N).sum()
