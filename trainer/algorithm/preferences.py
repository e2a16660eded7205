"""Losses for pairs with a preferred side: DPO and its variants, and reward modelling (Bradley and Terry).

Axes: P pairs. Losses are sums of terms per pair, each multiplied by its share of the batch, so that the losses of a
batch's parts sum to the loss of the batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from trainer.config import PreferenceForm


@dataclass(frozen=True, kw_only=True, slots=True)
class PreferenceInputs:
    """For both sides of each pair, log-probabilities summed over the trained tokens, and the number of these tokens.

    `chosen_P` and `rejected_P` are under the policy, with gradient; the others under the reference. Each term is
    multiplied by `share_P`: 1 / the number of pairs in the batch.
    """

    chosen_P: Tensor
    rejected_P: Tensor
    reference_chosen_P: Tensor
    reference_rejected_P: Tensor
    chosen_tokens_P: Tensor
    rejected_tokens_P: Tensor
    share_P: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class PairLoss:
    """The loss, a scalar and the only field with a gradient, and the margins of the chosen sides.

    `margin_P` is the difference of the two sides: in β times log-ratios for DPO, in scores for a reward model.
    """

    loss: Tensor
    margin_P: Tensor


def preference_loss(
    inputs: PreferenceInputs, form: PreferenceForm, beta: float, label_smoothing: float = 0.0
) -> PairLoss:
    """Return Σ share · term, with Δ the chosen side's log(policy / reference) minus the rejected side's:

    - sigmoid: −(1 − ε) log σ(βΔ) − ε log σ(−βΔ) (Rafailov et al. 2023; ε, the share of labels that are believed to
      be wrong, is `label_smoothing`: Mitchell 2023);
    - sigmoid_norm: the same with each side's log-ratio divided by its tokens;
    - ipo: (Δ − 1/(2β))² of those (Azar et al. 2023, per token as its authors compute it).
    """
    chosen_P = inputs.chosen_P - inputs.reference_chosen_P
    rejected_P = inputs.rejected_P - inputs.reference_rejected_P
    if form is not PreferenceForm.SIGMOID:
        chosen_P = chosen_P / inputs.chosen_tokens_P.clamp(min=1)
        rejected_P = rejected_P / inputs.rejected_tokens_P.clamp(min=1)
    ahead_P = chosen_P - rejected_P
    if form is PreferenceForm.IPO:
        terms_P = (ahead_P - 1 / (2 * beta)).square()
    else:
        right_P, wrong_P = functional.logsigmoid(beta * ahead_P), functional.logsigmoid(-beta * ahead_P)
        terms_P = -(1 - label_smoothing) * right_P - label_smoothing * wrong_P
    return PairLoss(loss=(inputs.share_P * terms_P).sum(), margin_P=(beta * ahead_P).detach())


def bradley_terry(chosen_P: Tensor, rejected_P: Tensor, share_P: Tensor) -> PairLoss:
    """Return Σ share · −log σ(s⁺ − s⁻) for scores s (Bradley and Terry 1952; Ouyang et al. 2022)."""
    ahead_P = chosen_P - rejected_P
    return PairLoss(loss=-(share_P * functional.logsigmoid(ahead_P)).sum(), margin_P=ahead_P.detach())


def accuracy(margin_P: Tensor) -> float:
    """Return the share of pairs that are ranked correctly; a tie counts one half."""
    return (margin_P > 0).double().add((margin_P == 0).double() / 2).mean().item() if margin_P.numel() else torch.nan
