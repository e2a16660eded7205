"""Passes over micro-batches, as a learner asks them of a policy, however the policy runs them.

Axes: B rows, T tokens, N scored tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from trainer.parallel.tensor import total_norm


class Rows(NamedTuple):
    """A policy's inputs, in this order: the tokens of a micro-batch's rows, and the N tokens to score."""

    input_ids_BT: Tensor
    position_ids_BT: Tensor
    predictor_N: Tensor
    targets_N: Tensor
    temperature_N: Tensor
    reach_BT: Tensor | None = None
    balance: float = 0.0
    """Weight of each of the N tokens in the load-balancing loss of routers (`archon/moe.py`). Its gradient comes with
    that of any loss of the scores."""


class Scores(NamedTuple):
    """Of the N tokens: log-probabilities and entropies, float32."""

    logprobs_N: Tensor
    entropies_N: Tensor


Loss = Callable[[int, Scores], Tensor]
"""(number of a micro-batch, its scores) → the loss to differentiate."""


class Passes:
    """Passes of a module whose call takes `Rows` and returns `Scores`, one micro-batch after the other."""

    __call__: Callable[..., Any]
    parameters: Callable[..., Iterator[nn.Parameter]]

    @property
    def elsewhere(self) -> frozenset[str]:
        """Names of weights that only ranks at other places of a pipeline have."""
        return frozenset()

    def score(self, rows: Sequence[Rows]) -> list[Scores]:
        """Score rows without a gradient, on every rank that sees them. A collective, as all passes are."""
        with torch.no_grad():
            return [Scores(*self(*each)) for each in rows]

    def learn(self, rows: Sequence[Rows], loss: Loss) -> list[Scores]:
        """Add the gradient of each micro-batch's loss and return the scores, as `score` does. One call covers all
        that one optimiser step learns from. In a pipeline only the last stage calls `loss`."""
        found = []
        for number, each in enumerate(rows):
            scores = Scores(*self(*each))
            torch.autograd.backward(loss(number, scores))
            found.append(Scores(scores.logprobs_N.detach(), scores.entropies_N.detach()))
        return found

    def gradient_norm(self) -> float:
        """Return the norm of the whole model's gradient, after the last `learn` of a step. A collective."""
        return total_norm(weight.grad for weight in self.parameters() if weight.grad is not None)
