"""The critic beside a policy: advantages from its values and a batch's rewards, and its own training.

Axes: N trained tokens of a micro-batch, or of all that a rank holds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainer.algorithm.gae import Discounts, RewardTree, batch_advantages, scaled, set_apart
from trainer.algorithm.parts import Algorithm
from trainer.algorithm.value_loss import value_loss
from trainer.batching.packing import MicroBatch
from trainer.config import OptimizerSettings
from trainer.models.state_dict import put_weights
from trainer.models.value import ValueModel
from trainer.optimizer import adamw, clip_gradients, learning_rate_at, step_at
from trainer.parallel.checkpoint import below, capture_optimizer, restore_optimizer
from trainer.parallel.mesh import Ranks


class Credit(NamedTuple):
    """The values of a micro-batch's tokens at the start of the step, the returns that the critic learns to predict,
    and the advantages that the policy learns from. On the CPU, float32."""

    values_N: Tensor
    returns_N: Tensor
    advantages_N: Tensor

    def to(self, device: torch.device) -> Credit:
        return Credit(*(each.to(device) for each in self))


class Critic:
    """A value model with its optimiser. Every rank has a critic and calls the same methods in the same order."""

    def __init__(self, model: ValueModel, algorithm: Algorithm, settings: OptimizerSettings, ranks: Ranks) -> None:
        self.model = model
        self.steps = 0
        """Optimiser steps that the critic has taken."""
        self._algorithm = algorithm
        self._settings = settings
        self._ranks = ranks
        self._parameters = list(model.parameters())
        self._optimizer = adamw(model, settings)

    @property
    def learns_alone(self) -> bool:
        """Return whether the next step trains the critic alone."""
        return self.steps < self._algorithm.critic_warmup

    def credit(
        self,
        shares: Sequence[Sequence[MicroBatch]],
        costs: Sequence[Sequence[Tensor | None]],
        rewards: Mapping[int, RewardTree],
    ) -> list[list[Credit]]:
        """Return the credit of each micro-batch of this rank's shares. `costs` are subtracted from the rewards of the
        tokens; None stands for no cost.

        A path may go through micro-batches of several ranks, so the first rank computes the credit of all of them.
        """
        batches = [batch for share in shares for batch in share]
        values = [self._values(batch, learns=False).cpu() for batch in batches]
        less = [
            torch.zeros_like(value_N) if cost_N is None else cost_N.cpu()
            for value_N, cost_N in zip(values, (cost_N for each in costs for cost_N in each), strict=True)
        ]
        mine = (
            torch.cat([batch.trajectory_N for batch in batches]),
            torch.cat([batch.turn_N for batch in batches]),
            torch.cat([batch.forced_N for batch in batches]),
            torch.cat(values),
            torch.cat(less),
        )
        gathered = self._ranks.gather(mine)
        every = self._ranks.from_first(lambda: self._credit_all(gathered, rewards))
        counts = [value_N.numel() for value_N in values]
        parts = zip(*(torch.split(column_N, counts) for column_N in every[self._ranks.data_rank]), strict=True)
        found = [Credit(value_N, *part) for value_N, part in zip(values, parts, strict=True)]
        ends = list(accumulate(len(share) for share in shares))
        return [found[end - len(share) : end] for end, share in zip(ends, shares, strict=True)]

    def _credit_all(
        self, gathered: Sequence[tuple[Tensor, ...]], rewards: Mapping[int, RewardTree]
    ) -> list[tuple[Tensor, Tensor]]:
        """Return (returns, advantages) of the tokens of every rank."""
        trajectory_N, turn_N, forced_N, values_N, costs_N = (
            torch.cat(column) for column in zip(*gathered, strict=True)
        )
        algorithm = self._algorithm
        discounts = Discounts(
            discount=algorithm.discount, gae_lambda=algorithm.gae_lambda, turn_discount=algorithm.turn_discount
        )
        found_N = batch_advantages(trajectory_N, turn_N, values_N, costs_N, rewards, discounts)
        # The advantage of a superseded answer says nothing about the value. With its own value as return, the critic
        # learns nothing there.
        returns_N = torch.where(set_apart(trajectory_N, turn_N, rewards), values_N, values_N + found_N)
        advantages_N = scaled(torch.where(forced_N, torch.zeros_like(found_N), found_N), algorithm.scale)
        counts = [columns[0].numel() for columns in gathered]
        return list(
            zip(torch.split(returns_N.float(), counts), torch.split(advantages_N.float(), counts), strict=True)
        )

    def accumulate(self, batch: MicroBatch, credit: Credit, tokens: int) -> float:
        """Add the gradient of a micro-batch and return its loss, a mean over the `tokens` of its mini-batch."""
        values_N = self._values(batch, learns=True)
        share_N = torch.full_like(values_N, 1 / max(1, tokens))
        loss = value_loss(values_N, credit.values_N, credit.returns_N, share_N, self._algorithm.value_clip)
        torch.autograd.backward(loss)
        return loss.item()

    def zero_grad(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)

    def clip_gradients(self) -> float:
        return clip_gradients(self._parameters, self._settings.clip_norm)

    def step(self) -> None:
        step_at(self._optimizer, self._algorithm.critic_rate * learning_rate_at(self.steps, self._settings))
        self.steps += 1

    def _values(self, batch: MicroBatch, *, learns: bool) -> Tensor:
        batch = batch.to(self._ranks.device)
        with torch.set_grad_enabled(learns):
            values_N: Tensor = self.model(
                batch.input_ids_BT, batch.position_ids_BT, batch.predictor_N, batch.reach_BT
            )
        return values_N

    def capture(self) -> dict[str, Any]:
        """Return everything that the critic's next step depends on, as this rank has it, without copies."""
        return {
            "steps": self.steps,
            "weights": {name: parameter.detach() for name, parameter in self.model.named_weights()},
            "optimizer": capture_optimizer(self.model.named_weights(), self._optimizer),
        }

    def divided(self) -> dict[str, Tensor | None]:
        """Return the tensors of `Learner.divided` for the critic's own state."""
        weights: dict[str, Tensor | None] = dict(self.model.named_weights())
        return {**below("weights", weights), **below("optimizer", weights)}

    def restore(self, state: Mapping[str, Any] | None) -> None:
        """Take over a captured state. None makes the critic begin anew. Raises WeightsUnusable."""
        if state is None:
            self.model.begin_anew()
        else:
            put_weights(self.model.named_weights(), state["weights"], "the critic of the trainer state")
        self.steps = 0 if state is None else int(state["steps"])
        restore_optimizer(self.model.named_weights(), self._optimizer, {} if state is None else state["optimizer"])
