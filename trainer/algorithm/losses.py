"""Policy losses: sums of token terms over an explicit denominator, so that micro-batches and data parallelism change
nothing.

Axes: N trained tokens. All log-probabilities are taken at the temperature that the token was sampled at.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyLossInputs:
    """Log-probabilities of the N trained tokens under the current policy (with gradient), the proximal policy (the
    weights at the start of the step) and the behaviour policy (the engine's record), and the advantages."""

    logprobs_N: Tensor
    proximal_N: Tensor
    behaviour_N: Tensor
    advantages_N: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class ClipRange:
    """The ratio is clipped to [1 − low, 1 + high]. `dual` bounds −ρA for A < 0 by −dual · A; None: unbounded."""

    low: float
    high: float
    dual: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyLoss:
    """`loss` is a scalar. `clipped_N` marks tokens whose gradient the clip took away. No field but `loss` carries a
    gradient."""

    loss: Tensor
    weight_N: Tensor
    clipped_N: Tensor


def decoupled_policy_loss(
    inputs: PolicyLossInputs, clip: ClipRange, importance_cap: float, denominator: int
) -> PolicyLoss:
    """1/denominator · Σ w · max(−ρA, −clip(ρ, 1−low, 1+high)A), with ρ = exp(logp − prox) and the truncated weight
    w = min(exp(prox − behave), importance_cap), which carries no gradient.

    With the behaviour policy as the proximal one this is PPO's clipped loss (Schulman et al. 2017). Decoupled form:
    Hilton et al. 2022; dual clip: Ye et al. 2020; truncation: Espeholt et al. 2018.
    """
    proximal_N = inputs.proximal_N.detach()
    advantages_N = inputs.advantages_N
    weight_N = (proximal_N - inputs.behaviour_N).clamp(max=math.log(importance_cap)).exp()
    ratio_N = (inputs.logprobs_N - proximal_N).exp()
    free_N = -ratio_N * advantages_N
    bound_N = -ratio_N.clamp(1 - clip.low, 1 + clip.high) * advantages_N
    terms_N = torch.maximum(free_N, bound_N)
    clipped_N = (bound_N > free_N).detach()
    if clip.dual is not None:
        dual_N = -clip.dual * advantages_N
        beyond_N = (advantages_N < 0) & (terms_N > dual_N)
        terms_N = torch.where(beyond_N, dual_N, terms_N)
        clipped_N = clipped_N | beyond_N.detach()
    return PolicyLoss(loss=(weight_N * terms_N).sum() / denominator, weight_N=weight_N, clipped_N=clipped_N)


def loglinear_proximal(logprobs_N: Tensor, behaviour_N: Tensor, staleness_N: Tensor) -> Tensor:
    """The proximal policy between behaviour and current one: behave + α(logp − behave), without gradient.

    α = clamp((v − 1 − v_b) / (v − v_b), 0, 1), where v is the version that the step makes and v_b the token's own;
    `staleness_N` = v − 1 − v_b. A token of the head's own policy (staleness 0) has its behaviour as its proximal.
    """
    age_N = staleness_N.clamp(min=0)
    alpha_N = age_N / (age_N + 1)
    return behaviour_N + alpha_N * (logprobs_N.detach() - behaviour_N)
