"""Importance weights: the correction for tokens that were drawn by another policy than the trained one.

Every weight is computed from ρ, the trainer's probability of a token over the probability that the engine recorded:
exp(prox − behave) in a policy loss, exp(logp − behave) in a divergence term. ρ has two causes that cannot be
distinguished: the age of the token (its version is older than the trainer's) and the mismatch of the two
implementations at one version (numerics, quantised weights, a wrong version). Both bias the gradient in the same way
and have the same correction.

A sequence is one answer: the output of one turn. Other turns of the session have weights of their own.

Axes: N trained tokens, A answers; no answer is divided between two calls. Weights carry no gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.algorithm.objective import Bounds, Objective
from trainer.config import Correction


def importance_weight(
    objective: Objective,
    logratio_N: Tensor,
    answer_N: Tensor,
    altered_N: Tensor,
    advantages_N: Tensor | None = None,
) -> Tensor:
    """Return the weight of each token under the objective's correction; 0 leaves the token out.

    `logratio_N` is log ρ. `advantages_N` is None for a divergence term, which has no advantage. `altered_N` marks
    tokens whose recorded log-probability belongs to a distribution that a grammar, a penalty or a bias changed. Their
    ratio is no sign of a mismatch: it does not count in a decision about its answer, and their weight is min(ρ, cap)
    under every correction. An answer with a token whose ρ is below the objective's `veto` is left out.
    """
    bounds = objective.bounds
    logratio_N = logratio_N.detach()
    own_N = torch.where(altered_N, torch.zeros_like(logratio_N), logratio_N)
    weight_N = _WEIGHTS[objective.correction](own_N, _Answers.of(answer_N, altered_N), bounds)
    if objective.correction is Correction.SIGNED_TRUNCATE and advantages_N is not None:
        weight_N = torch.where(advantages_N > 0, weight_N.clamp(min=1.0), weight_N)
    weight_N = torch.where(altered_N, _capped(logratio_N, bounds.cap), weight_N)
    return weight_N if objective.veto is None else weight_N * vetoed(own_N, answer_N, objective.veto)


def vetoed(logratio_N: Tensor, answer_N: Tensor, veto: float) -> Tensor:
    """Return 1 for tokens of answers in which every ρ is at least `veto`, and 0 for tokens of other answers.

    A token that the trainer's policy would hardly ever draw shows that another policy drew the answer (the veto of
    veRL's rollout correction; Liu, Li et al. 2025, "When Speed Kills Stability").
    """
    below_A = torch.zeros(_count(answer_N), dtype=torch.long, device=logratio_N.device)
    below_A = below_A.index_add(0, answer_N, (logratio_N < math.log(veto)).long())
    return (below_A == 0)[answer_N].to(logratio_N.dtype)


@dataclass(frozen=True, slots=True)
class _Answers:
    """The answer of each token, and the number of unaltered tokens of each answer."""

    answer_N: Tensor
    counts_A: Tensor

    @staticmethod
    def of(answer_N: Tensor, altered_N: Tensor) -> _Answers:
        counts_A = torch.zeros(_count(answer_N), dtype=torch.long, device=answer_N.device)
        return _Answers(answer_N, counts_A.index_add(0, answer_N, (~altered_N).long()))

    def sums(self, values_N: Tensor) -> Tensor:
        """Sum `values_N` over each answer, shape N."""
        sums_A = torch.zeros(len(self.counts_A), dtype=values_N.dtype, device=values_N.device)
        return sums_A.index_add(0, self.answer_N, values_N)[self.answer_N]

    def means(self, values_N: Tensor) -> Tensor:
        """Average `values_N`, which are 0 for altered tokens, over the other tokens of each answer, shape N."""
        return self.sums(values_N) / self.counts_A.clamp(min=1)[self.answer_N]


def _count(answer_N: Tensor) -> int:
    return int(answer_N.max()) + 1 if answer_N.numel() else 0


def _none(logratio_N: Tensor, answers: _Answers, bounds: Bounds) -> Tensor:
    """w = 1."""
    return torch.ones_like(logratio_N)


def _truncate(logratio_N: Tensor, answers: _Answers, bounds: Bounds) -> Tensor:
    """w = clip(ρ, low, high) (truncated importance sampling: Ionides 2008, Espeholt et al. 2018; between engine and
    trainer: Yao et al. 2025; TRL's `token_truncate`)."""
    return _clipped(logratio_N, bounds)


def _signed_truncate(logratio_N: Tensor, answers: _Answers, bounds: Bounds) -> Tensor:
    """w = clip(ρ, low, high), which `importance_weight` raises to at least 1 where A > 0.

    A truncated ratio vanishes where the trained policy has become less likely than the behaviour policy. For answers
    better than their baseline that is the gradient which would bring the policy back, and without it a policy that
    has drifted never returns while the engine repeats old answers. With a cap of 1 this is the weight of TOPR (Le
    Roux et al. 2025), by token instead of by answer.
    """
    return _clipped(logratio_N, bounds)


def _mask(logratio_N: Tensor, answers: _Answers, bounds: Bounds) -> Tensor:
    """w = ρ where low ≤ ρ ≤ high, else 0 (IcePop, Ling Team 2025; TRL's `token_mask`)."""
    return _within(logratio_N, logratio_N, bounds)


def _sequence_truncate(logratio_N: Tensor, answers: _Answers, bounds: Bounds) -> Tensor:
    """w = clip(Π ρ, low, high) for all tokens of an answer (TRL's `sequence_truncate`)."""
    return _clipped(answers.sums(logratio_N), bounds)


def _sequence_mask(logratio_N: Tensor, answers: _Answers, bounds: Bounds) -> Tensor:
    """w = Π ρ for all tokens of an answer where low ≤ Π ρ ≤ high, else 0 (masked importance sampling, Liu, Li et al.
    2025; TRL's `sequence_mask`)."""
    product_N = answers.sums(logratio_N)
    return _within(product_N, product_N, bounds)


def _geometric_mask(logratio_N: Tensor, answers: _Answers, bounds: Bounds) -> Tensor:
    """w = min(ρ, cap) in answers with low ≤ (Π ρ)^(1/tokens) ≤ high, else 0: rejection does not depend on an answer's
    length (geometric rejection with truncated token weights, Liu, Li et al. 2025; veRL's rollout correction)."""
    return _within(logratio_N.clamp(max=math.log(bounds.cap)), answers.means(logratio_N), bounds)


def _capped(logratio_N: Tensor, cap: float) -> Tensor:
    return logratio_N.clamp(max=math.log(cap)).exp()


def _clipped(logratio_N: Tensor, bounds: Bounds) -> Tensor:
    return logratio_N.clamp(min=_log(bounds.low), max=_log(bounds.high)).exp()


def _within(logweight_N: Tensor, judged_N: Tensor, bounds: Bounds) -> Tensor:
    """Return exp(logweight) where the judged logarithm is within the bounds, else 0. Logarithms are compared because
    they do not overflow."""
    inside_N = (judged_N >= _log(bounds.low)) & (judged_N <= _log(bounds.high))
    return torch.where(inside_N, logweight_N, torch.full_like(logweight_N, -math.inf)).exp()


def _log(bound: float) -> float:
    return math.log(bound) if bound > 0 else -math.inf


_WEIGHTS: dict[Correction, Callable[[Tensor, _Answers, Bounds], Tensor]] = {
    Correction.NONE: _none,
    Correction.TRUNCATE: _truncate,
    Correction.SIGNED_TRUNCATE: _signed_truncate,
    Correction.MASK: _mask,
    Correction.SEQUENCE_TRUNCATE: _sequence_truncate,
    Correction.SEQUENCE_MASK: _sequence_mask,
    Correction.GEOMETRIC_MASK: _geometric_mask,
}
