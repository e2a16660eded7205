"""What a learner asks of a policy: passes over micro-batches, however the policy runs them.

Axes: B rows, T tokens, N scored tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from trainer.parallel.tensor import total_norm


class Rows(NamedTuple):
    """The tokens of a micro-batch's rows, and N of them in their places: what a policy takes, in this order."""

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
"""(number of a micro-batch, its scores) → what its gradient is of."""


class Passes:
    """A module's, whose call takes `Rows` and gives `Scores`: one micro-batch after the other."""

    __call__: Callable[..., Any]
    parameters: Callable[..., Iterator[nn.Parameter]]

    @property
    def elsewhere(self) -> frozenset[str]:
        """Names of weights that only ranks at other places of a pipeline have."""
        return frozenset()

    def score(self, rows: Sequence[Rows]) -> list[Scores]:
        """Without gradient, on every rank that sees the rows. A collective, as all passes are."""
        with torch.no_grad():
            return [Scores(*self(*each)) for each in rows]

    def learn(self, rows: Sequence[Rows], loss: Loss) -> list[Scores]:
        """Adds the gradient of each one's loss; their scores, as of `score`. All that one optimiser step learns from
        goes through one call. In a pipeline `loss` is asked at the last stage alone."""
        found = []
        for number, each in enumerate(rows):
            scores = Scores(*self(*each))
            torch.autograd.backward(loss(number, scores))
            found.append(Scores(scores.logprobs_N.detach(), scores.entropies_N.detach()))
        return found

    def gradient_norm(self) -> float:
        """Of the whole model, once all of its gradient is there. A collective."""
        return total_norm(weight.grad for weight in self.parameters() if weight.grad is not None)
