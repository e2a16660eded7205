"""Policy losses: sums of terms per token, each multiplied by its share of the batch, so that the division into
micro-batches and among ranks does not change them.

Axes: N trained tokens. All log-probabilities are taken at the temperature that the token was sampled at. An answer is
the output of one turn; no answer is divided between two calls.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.algorithm.correction import importance_weight
from trainer.algorithm.objective import Objective
from trainer.config import Surrogate


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyLossInputs:
    """Log-probabilities of the N trained tokens under the current policy (with gradient), the proximal policy (the
    weights at the start of the step) and the behaviour policy (the engine's record), and the advantages.

    `answer_N` numbers the answer of each token, from 0. Each term is multiplied by `share_N`: 1 / the batch's
    denominator, or 0 for a token to ignore. `altered_N` marks tokens that were drawn from a distribution that a
    grammar, a penalty or a bias had changed.
    """

    logprobs_N: Tensor
    proximal_N: Tensor
    behaviour_N: Tensor
    advantages_N: Tensor
    answer_N: Tensor
    share_N: Tensor
    altered_N: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyLoss:
    """The loss, a scalar and the only field with a gradient, and figures about it.

    `clipped_N` marks tokens whose gradient a clip removed or, with CISPO, bounded.
    """

    loss: Tensor
    weight_N: Tensor
    clipped_N: Tensor


def policy_loss(inputs: PolicyLossInputs, objective: Objective, own_N: Tensor | None = None) -> PolicyLoss:
    """Return Σ share · w · term, with exp(logp − prox) as the ratio in the surrogate's term and the weight w that
    `importance_weight` makes of exp(prox − behave). The weight carries no gradient.

    With the behaviour policy as the proximal one, w is 1 and this is the surrogate as published; otherwise the loss
    is decoupled (Hilton et al. 2022). `own_N` are the terms of a user's own loss, which replace the surrogate's.
    """
    proximal_N = inputs.proximal_N.detach()
    logratio_N = proximal_N - inputs.behaviour_N
    weight_N = importance_weight(objective, logratio_N, inputs.answer_N, inputs.altered_N, inputs.advantages_N)
    if own_N is not None:
        terms_N, clipped_N = own_N, torch.zeros_like(own_N, dtype=torch.bool)
    else:
        terms_N, clipped_N = _SURROGATES[objective.surrogate](inputs, inputs.logprobs_N - proximal_N, objective)
    return PolicyLoss(
        loss=(inputs.share_N * weight_N * terms_N).sum(), weight_N=weight_N, clipped_N=clipped_N.detach()
    )


def loglinear_proximal(logprobs_N: Tensor, behaviour_N: Tensor, staleness_N: Tensor) -> Tensor:
    """Return a proximal policy between the behaviour and the current one, behave + α(logp − behave), without
    gradient.

    α = clamp((v − 1 − v_b) / (v − v_b), 0, 1), where v is the version that the step makes and v_b the token's
    version; `staleness_N` = v − 1 − v_b. For a token of the newest version (staleness 0) it is the behaviour policy.
    """
    age_N = staleness_N.clamp(min=0)
    alpha_N = age_N / (age_N + 1)
    return behaviour_N + alpha_N * (logprobs_N.detach() - behaviour_N)


def beyond_behaviour(difference_N: Tensor, advantages_N: Tensor) -> Tensor:
    """Mark the tokens whose probability already moved away from the behaviour policy in the direction of their
    advantage.

    `difference_N` is log(policy / behaviour). Tokens with A > 0 and a ratio above 1, or A < 0 and a ratio below 1,
    are those that PPO's clip could leave out; a gradient on the others moves them back towards the behaviour policy.
    """
    return advantages_N * difference_N > 0


def second_moment_cut(difference_N: Tensor, bound: float) -> float:
    """Return the largest square such that the mean of all squares up to it is at most `bound`.

    `difference_N` has log(policy / behaviour) of all candidates of the batch (M2PO, Zheng et al. 2025); tokens beyond
    the cut are left out. Infinity leaves out none. Tokens with equal squares are left out together or not at all.
    """
    squares_N = squared(difference_N).sort().values
    means_N = squares_N.cumsum(0) / torch.arange(1, squares_N.numel() + 1, device=squares_N.device)
    beyond = int((means_N <= bound).sum())  # the means of sorted squares never fall
    if beyond == squares_N.numel():
        return math.inf
    nearer_N = squares_N[squares_N < squares_N[beyond]]
    return float(nearer_N[-1]) if nearer_N.numel() else -1.0


def squared(difference_N: Tensor) -> Tensor:
    """Return the squares in float64, the precision in which `second_moment_cut` compares them."""
    return difference_N.double().square()


def _unclipped(inputs: PolicyLossInputs, logratio_N: Tensor, objective: Objective) -> tuple[Tensor, Tensor]:
    """Return −ρA: where ρ is 1 this is REINFORCE (Williams 1992), elsewhere its importance-weighted form."""
    terms_N = -logratio_N.exp() * inputs.advantages_N
    return terms_N, torch.zeros_like(inputs.advantages_N, dtype=torch.bool)


def _clipped(inputs: PolicyLossInputs, logratio_N: Tensor, objective: Objective) -> tuple[Tensor, Tensor]:
    """max(−ρA, −clip(ρ)A) (PPO, Schulman et al. 2017; dual clip: Ye et al. 2020)."""
    return _bounded(logratio_N.exp(), inputs.advantages_N, objective)


def _sequence_clipped(inputs: PolicyLossInputs, logratio_N: Tensor, objective: Objective) -> tuple[Tensor, Tensor]:
    """PPO's clip with the geometric mean of an answer's ratios as the ratio of each of its tokens (GSPO, Zheng et al.
    2025, in its form per token: the gradient is that of the token's own log-probability)."""
    answers = int(inputs.answer_N.max()) + 1 if inputs.answer_N.numel() else 0
    counts_A = torch.bincount(inputs.answer_N, minlength=answers).to(logratio_N.dtype)
    sums_A = torch.zeros(answers, dtype=logratio_N.dtype, device=logratio_N.device)
    means_A = sums_A.index_add(0, inputs.answer_N, logratio_N.detach()) / counts_A.clamp(min=1)
    own_N = (logratio_N - logratio_N.detach()).exp()  # 1, with the gradient of the token's log-probability
    return _bounded(means_A[inputs.answer_N].exp() * own_N, inputs.advantages_N, objective)


def _truncated(inputs: PolicyLossInputs, logratio_N: Tensor, objective: Objective) -> tuple[Tensor, Tensor]:
    """−clip(ρ) · A · logp with the gradient of logp alone: no token loses its gradient (CISPO, MiniMax 2025)."""
    ratio_N = logratio_N.detach().exp()
    bounded_N = ratio_N.clamp(1 - objective.clip_low, 1 + objective.clip_high)
    return -bounded_N * inputs.advantages_N * inputs.logprobs_N, bounded_N != ratio_N


def _gated(inputs: PolicyLossInputs, logratio_N: Tensor, objective: Objective) -> tuple[Tensor, Tensor]:
    """−(4/τ) · σ(τ(ρ − 1)) · A, with a τ for each sign of A: the gradient fades with the distance instead of being
    cut (SAPO, Gao et al. 2025)."""
    advantages_N = inputs.advantages_N
    positive_N = torch.full_like(advantages_N, objective.gate_positive)
    gate_N = torch.where(advantages_N > 0, positive_N, torch.full_like(advantages_N, objective.gate_negative))
    terms_N = -4 / gate_N * torch.sigmoid(gate_N * (logratio_N.exp() - 1)) * advantages_N
    return terms_N, torch.zeros_like(advantages_N, dtype=torch.bool)


def _bounded(ratio_N: Tensor, advantages_N: Tensor, objective: Objective) -> tuple[Tensor, Tensor]:
    free_N = -ratio_N * advantages_N
    bound_N = -ratio_N.clamp(1 - objective.clip_low, 1 + objective.clip_high) * advantages_N
    terms_N = torch.maximum(free_N, bound_N)
    clipped_N = bound_N > free_N
    if objective.dual_clip is not None:
        dual_N = -objective.dual_clip * advantages_N
        beyond_N = (advantages_N < 0) & (terms_N > dual_N)
        terms_N = torch.where(beyond_N, dual_N, terms_N)
        clipped_N = clipped_N | beyond_N
    return terms_N, clipped_N


_Terms = Callable[[PolicyLossInputs, Tensor, Objective], tuple[Tensor, Tensor]]

_SURROGATES: dict[Surrogate, _Terms] = {
    Surrogate.RATIO: _unclipped,
    Surrogate.CLIP: _clipped,
    Surrogate.SEQUENCE_CLIP: _sequence_clipped,
    Surrogate.TRUNCATED: _truncated,
    Surrogate.GATED: _gated,
}
