"""The loss of one micro-batch, and the record of its tokens.

Axes: N trained tokens of the micro-batch.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from trainer.algorithm.correction import importance_weight
from trainer.algorithm.custom import LossInputs
from trainer.algorithm.divergence import divergence
from trainer.algorithm.entropy import entropy_loss
from trainer.algorithm.imitation import distillation
from trainer.algorithm.losses import PolicyLoss, PolicyLossInputs, policy_loss
from trainer.algorithm.parts import Algorithm
from trainer.algorithm.user_functions import call_loss
from trainer.batching.packing import MicroBatch
from trainer.batching.teaching import Taught, taught_of
from trainer.config import Denominator
from trainer.critic import Credit
from trainer.errors import UserFunctionFailed
from trainer.models.passes import Scores
from trainer.update.outcome import TokenRecord
from trainer.update.start import TokensAtStart


class MicroBatchLoss:
    """Computes the losses of one update. `taught` are the teacher's log-probabilities, if the algorithm has one."""

    def __init__(self, algorithm: Algorithm, taught: Taught | None) -> None:
        self._algorithm = algorithm
        self._taught = taught
        self.failures: list[str] = []
        """Errors of the user's own loss, as they happened."""

    def __call__(
        self, batch: MicroBatch, scores: Scores, denominator: int, start: TokensAtStart, credit: Credit | None
    ) -> tuple[Tensor, TokenRecord]:
        """Return the loss under `scores`, divided by `denominator`, and the record of the tokens."""
        logprobs_N, entropy_N = scores
        algorithm = self._algorithm
        start = start.to(logprobs_N.device)
        advantages_N = start.advantages(batch, credit)
        share_N = self._shares(batch, denominator)
        if start.included_N is not None:
            share_N = share_N * start.included_N
        inputs = PolicyLossInputs(
            logprobs_N=logprobs_N,
            proximal_N=start.proximal_N,
            behaviour_N=batch.behaviour_N,
            advantages_N=advantages_N,
            answer_N=batch.answer_N,
            share_N=share_N if start.policy_loss_N is None else share_N * start.policy_loss_N,
            altered_N=batch.altered_N,
        )
        own_N = None if algorithm.loss is None else self._own_terms(batch, inputs, entropy_N, start)
        result = policy_loss(inputs, algorithm.objective, own_N)
        loss = result.loss
        if start.reference_N is not None and start.cost_N is None:
            apart_N = divergence(algorithm.kl_form, logprobs_N, start.reference_N)
            weight_N = self._divergence_weight(batch, logprobs_N)
            loss = loss + algorithm.kl_coefficient * (share_N * weight_N * apart_N).sum()
        if algorithm.entropy_coefficient > 0:
            loss = loss + entropy_loss(entropy_N, share_N, algorithm.entropy_coefficient)
        if self._taught is not None:
            teacher_N = taught_of(batch.trajectory_N, batch.turn_N, self._taught).to(logprobs_N.device)
            apart = distillation(logprobs_N, teacher_N, share_N, self._divergence_weight(batch, logprobs_N))
            loss = algorithm.rl_coefficient * loss + algorithm.distill_coefficient * apart
        return loss, _record(batch, start, inputs, result, credit)

    def _shares(self, batch: MicroBatch, denominator: int) -> Tensor:
        """Return the share of each token in the loss."""
        even_N = torch.full_like(batch.advantages_N, 1 / denominator)
        if self._algorithm.denominator is not Denominator.ANSWERS or not batch.answer_N.numel():
            return even_N
        return even_N / torch.bincount(batch.answer_N)[batch.answer_N]

    def _divergence_weight(self, batch: MicroBatch, logprobs_N: Tensor) -> Tensor:
        """Return the importance weight of divergences: it is against the current policy, whichever the proximal one
        is."""
        logratio_N = logprobs_N - batch.behaviour_N
        return importance_weight(self._algorithm.objective, logratio_N, batch.answer_N, batch.altered_N)

    def _own_terms(
        self, batch: MicroBatch, inputs: PolicyLossInputs, entropy_N: Tensor, start: TokensAtStart
    ) -> Tensor:
        """Return the terms of the user's own loss; NaN if it fails.

        An exception would take this rank alone out of the step's collectives, in which the others would wait for it.
        With NaN no rank has a finite gradient, and all skip the mini-batch.
        """
        function = self._algorithm.loss
        assert function is not None
        if not batch.learns or not inputs.logprobs_N.numel():
            return 0 * inputs.logprobs_N
        tokens = LossInputs(
            logprobs_N=inputs.logprobs_N,
            entropy_N=entropy_N,
            proximal_N=inputs.proximal_N.detach(),
            behaviour_N=inputs.behaviour_N,
            reference_N=start.reference_N,
            advantages_N=inputs.advantages_N,
            answer_N=inputs.answer_N,
            staleness_N=batch.staleness_N,
        )
        try:
            return call_loss(function, tokens)
        except UserFunctionFailed as error:
            self.failures.append(str(error))
            return math.nan * inputs.logprobs_N


def _record(
    batch: MicroBatch, start: TokensAtStart, inputs: PolicyLossInputs, result: PolicyLoss, credit: Credit | None
) -> TokenRecord:
    unknown_N = torch.full_like(inputs.share_N, math.nan)
    return TokenRecord(
        logprobs_N=start.logprobs_N.cpu(),
        reference_N=(unknown_N if start.reference_N is None else start.reference_N).cpu(),
        behaviour_N=batch.behaviour_N.cpu(),
        entropy_N=start.entropy_N.cpu(),
        weight_N=result.weight_N.cpu(),
        clipped_N=(result.clipped_N | (inputs.share_N == 0)).cpu(),
        advantages_N=inputs.advantages_N.cpu(),
        values_N=(unknown_N if credit is None else credit.values_N).cpu(),
        returns_N=(unknown_N if credit is None else credit.returns_N).cpu(),
        staleness_N=batch.staleness_N.cpu(),
        trajectory_N=batch.trajectory_N.cpu(),
        turn_N=batch.turn_N.cpu(),
        altered_N=batch.altered_N.cpu(),
    )
