"""KTO: a loss for single answers that are labelled desirable or undesirable, without pairs (Ethayarajh et al. 2024).

Axes: E examples, M mismatched pairs of a prompt with the answer to another one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class KtoInputs:
    """Log-probabilities of answers, summed over their tokens, under the policy and under the reference.

    `logprobs_E` carries the gradient. `mismatched_M` belongs to answers after prompts of other examples.
    `desirable_E` is boolean. Each term is multiplied by `share_E`: 1 / the number of examples in the batch.
    """

    logprobs_E: Tensor
    reference_E: Tensor
    mismatched_M: Tensor
    mismatched_reference_M: Tensor
    desirable_E: Tensor
    share_E: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class KtoLoss:
    """The loss, a scalar and the only field with a gradient, and figures about it.

    `rewards_E` are β · log(policy / reference). `point` is β · z₀, the reward above which an answer counts as a gain.
    """

    loss: Tensor
    rewards_E: Tensor
    point: float


def reference_point(mismatched_M: Tensor, mismatched_reference_M: Tensor) -> Tensor:
    """Return z₀ = max(0, mean of log(policy / reference) over mismatched pairs), without gradient.

    It estimates KL(policy ‖ reference) by answers that are unrelated to their prompts, because drawing answers
    from the policy would cost a generation per step. Without pairs it is 0.
    """
    if not mismatched_M.numel():
        return mismatched_M.new_zeros(())
    return (mismatched_M - mismatched_reference_M).mean().clamp(min=0).detach()


def kto_loss(inputs: KtoInputs, beta: float, desirable_weight: float, undesirable_weight: float) -> KtoLoss:
    """Return Σ share · λ · (1 − σ(s · β · (log(policy / reference) − z₀))).

    λ and s are `desirable_weight` and 1 for a desirable answer, `undesirable_weight` and −1 for an undesirable one
    (equation 8 of the paper, λ_y − v).
    """
    ahead_E = inputs.logprobs_E - inputs.reference_E
    point = reference_point(inputs.mismatched_M, inputs.mismatched_reference_M)
    ones_E = torch.ones_like(ahead_E)
    sign_E = torch.where(inputs.desirable_E, ones_E, -ones_E)
    weight_E = torch.where(inputs.desirable_E, ones_E * desirable_weight, ones_E * undesirable_weight)
    terms_E = weight_E * (1 - torch.sigmoid(sign_E * beta * (ahead_E - point)))
    return KtoLoss(
        loss=(inputs.share_E * terms_E).sum(),
        rewards_E=(beta * ahead_E).detach(),
        point=beta * point.item(),
    )
