"""One optimiser step over the micro-batches of a batch.

Axes: N trained tokens of the whole batch, in the order of the micro-batches.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainer.algorithm.losses import ClipRange, PolicyLossInputs, decoupled_policy_loss, loglinear_proximal
from trainer.algorithm.presets import Algorithm
from trainer.config import Denominator, OptimizerSettings, Proximal
from trainer.intake.packing import MicroBatch, idle_micro_batch
from trainer.intake.sequences import TrainingSequence
from trainer.models.huggingface import PolicyModel
from trainer.parallel.checkpoint import capture_optimizer, restore_optimizer
from trainer.parallel.mesh import Ranks
from trainer.parallel.tensor import whole


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenRecord:
    """What the step saw of each trained token, on the CPU. `logprobs_N` are those before the step."""

    logprobs_N: Tensor
    behaviour_N: Tensor
    entropy_N: Tensor
    weight_N: Tensor
    clipped_N: Tensor
    advantages_N: Tensor
    staleness_N: Tensor
    trajectory_N: Tensor
    turn_N: Tensor
    constrained_N: Tensor

    @staticmethod
    def concatenate(records: Sequence[TokenRecord]) -> TokenRecord:
        names = TokenRecord.__slots__
        return TokenRecord(**{name: torch.cat([getattr(record, name) for record in records]) for name in names})


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """`stepped` false: the gradient was not finite and the weights are as before. `tokens` is None on all ranks but
    the first. `loss` is the batch's; `gradient_norm` is before clipping."""

    stepped: bool
    loss: float
    gradient_norm: float
    learning_rate: float
    tokens: TokenRecord | None


def learning_rate_at(step: int, settings: OptimizerSettings) -> float:
    """The rate of the step with this number, counted from 0: linear from 1/warmup_steps of it to the whole."""
    return settings.learning_rate * min(1.0, (step + 1) / max(1, settings.warmup_steps))


def denominator_of(kind: Denominator, sequences: Sequence[TrainingSequence]) -> int:
    """The batch's global count that the summed loss is divided by."""
    if kind is Denominator.SEQUENCES:
        return len(sequences)
    return sum(sequence.trained_tokens for sequence in sequences)


class Learner:
    """A model and its optimiser. Every rank has one and calls the same methods in the same order."""

    def __init__(self, model: PolicyModel, algorithm: Algorithm, settings: OptimizerSettings, ranks: Ranks) -> None:
        self.model = model
        self.steps = 0
        """Optimiser steps taken since version 0."""
        self._algorithm = algorithm
        self._settings = settings
        self._ranks = ranks
        self._clip = ClipRange(low=algorithm.clip_low, high=algorithm.clip_high, dual=algorithm.dual_clip)
        self._optimizer = torch.optim.AdamW(
            model.parameters(),
            lr=settings.learning_rate,
            betas=settings.betas,
            eps=settings.eps,
            weight_decay=settings.weight_decay,
            fused=True,
        )

    def update(self, micro_batches: Sequence[MicroBatch], denominator: int) -> Outcome:
        """Forward, backward and one step, shared by the ranks."""
        ranks = self._ranks
        mine = self._share(micro_batches, learns=True) + self._share(micro_batches, learns=False)
        self._optimizer.zero_grad(set_to_none=True)
        loss = 0.0
        records = []
        for micro_batch in mine:
            value, record = self._accumulate(micro_batch.to(ranks.device), denominator)
            loss += value
            records.append(record)
        learning_rate = learning_rate_at(self.steps, self._settings)
        norm = self._clip_gradients()
        stepped = math.isfinite(norm)
        if stepped:
            for group in self._optimizer.param_groups:
                group["lr"] = learning_rate
            self._optimizer.step()
            self.steps += 1
        self._optimizer.zero_grad(set_to_none=True)
        gathered = ranks.gather((loss, TokenRecord.concatenate(records)))
        return Outcome(
            stepped=stepped,
            loss=sum(part for part, _ in gathered),
            gradient_norm=norm,
            learning_rate=learning_rate,
            tokens=TokenRecord.concatenate([tokens for _, tokens in gathered]) if gathered else None,
        )

    def _share(self, micro_batches: Sequence[MicroBatch], *, learns: bool) -> list[MicroBatch]:
        """Every `size`-th micro-batch of a kind, and an idle one at the end where others have one more: all ranks
        must take part in the same collectives."""
        rank, size = self._ranks.rank, self._ranks.size
        kind = [micro_batch for micro_batch in micro_batches if micro_batch.learns is learns]
        mine = kind[rank::size]
        return mine + [idle_micro_batch(learns)] * (math.ceil(len(kind) / size) - len(mine))

    def _accumulate(self, batch: MicroBatch, denominator: int) -> tuple[float, TokenRecord]:
        """Adds a micro-batch's gradient, if it has one.

        With one step per batch the weights at its start are those of this very forward pass, so the recomputed
        proximal policy is the current one without its gradient.
        """
        with torch.set_grad_enabled(batch.learns):
            logprobs_N, entropy_N = self.model(
                batch.input_ids_BT, batch.position_ids_BT, batch.predictor_N, batch.targets_N, batch.temperature_N
            )
        current_N = logprobs_N.detach()
        proximal_N = current_N
        if self._algorithm.proximal is Proximal.LOGLINEAR:
            # What acted on constrained tokens is no policy that one could be between.
            between_N = loglinear_proximal(logprobs_N, batch.behaviour_N, batch.staleness_N)
            proximal_N = torch.where(batch.constrained_N, current_N, between_N)
        inputs = PolicyLossInputs(
            logprobs_N=logprobs_N,
            proximal_N=proximal_N,
            behaviour_N=batch.behaviour_N,
            advantages_N=batch.advantages_N,
        )
        result = decoupled_policy_loss(inputs, self._clip, self._algorithm.importance_cap, denominator)
        if batch.learns:
            torch.autograd.backward(result.loss)
        record = TokenRecord(
            logprobs_N=current_N.cpu(),
            behaviour_N=batch.behaviour_N.cpu(),
            entropy_N=entropy_N.cpu(),
            weight_N=result.weight_N.cpu(),
            clipped_N=result.clipped_N.cpu(),
            advantages_N=batch.advantages_N.cpu(),
            staleness_N=batch.staleness_N.cpu(),
            trajectory_N=batch.trajectory_N.cpu(),
            turn_N=batch.turn_N.cpu(),
            constrained_N=batch.constrained_N.cpu(),
        )
        return result.loss.item(), record

    def _clip_gradients(self) -> float:
        """Scales the gradient down to the norm bound; its norm before. Left alone where that is not finite."""
        gradients = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        norm = float(whole(torch.nn.utils.get_total_norm(gradients)).item())
        bound = self._settings.clip_norm
        if math.isfinite(norm) and norm > bound:
            torch._foreach_mul_(gradients, bound / (norm + 1e-6))
        return norm

    def capture(self) -> dict[str, Any]:
        """The optimiser's state and its place in the schedule. A collective; whole on the first rank alone."""
        optimizer = capture_optimizer(self.model.named_weights(), self._optimizer, keep=self._ranks.is_first)
        return {"steps": self.steps, "optimizer": optimizer}

    def restore(self, state: Mapping[str, Any] | None) -> None:
        """As captured; None makes the optimiser as new. Raises WeightsUnusable."""
        self.steps = 0 if state is None else int(state["steps"])
        restore_optimizer(self.model.named_weights(), self._optimizer, {} if state is None else state["optimizer"])
