"""Forward and backward passes over micro-batches, whether or not the model is divided among ranks.

Axes: B rows, T tokens, N scored tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from trainer.parallel.tensor import total_norm


class Rows(NamedTuple):
    """The arguments of a policy's call, in order: the tokens of a micro-batch's rows, and the N tokens to score."""

    input_ids_BT: Tensor
    position_ids_BT: Tensor
    predictor_N: Tensor
    targets_N: Tensor
    temperature_N: Tensor
    reach_BT: Tensor | None = None
    balance: float = 0.0
    """Weight of each of the N tokens in the load-balancing loss of routers (`archon/moe.py`). The gradient of that
    loss is added in the backward pass of any loss that is computed from the scores."""


class Scores(NamedTuple):
    """Log-probabilities and entropies of the N tokens, float32."""

    logprobs_N: Tensor
    entropies_N: Tensor


Loss = Callable[[int, Scores], Tensor]
"""(number of a micro-batch, its scores) → the loss to differentiate."""


class Passes:
    """Passes of a module whose call takes `Rows` and returns `Scores`, one micro-batch after another."""

    __call__: Callable[..., Any]
    parameters: Callable[..., Iterator[nn.Parameter]]

    @property
    def elsewhere(self) -> frozenset[str]:
        """Names of weights that only ranks of other pipeline stages have."""
        return frozenset()

    def in_float32(self) -> AbstractContextManager[None]:
        """Compute passes inside the block in float32. Models with a precision of their own override this."""
        return nullcontext()

    def score(self, rows: Sequence[Rows]) -> list[Scores]:
        """Score rows without a gradient, on every rank that sees them. A collective, like all passes."""
        with torch.no_grad():
            return [Scores(*self(*each)) for each in rows]

    def learn(self, rows: Sequence[Rows], loss: Loss) -> list[Scores]:
        """Accumulate the gradient of every micro-batch's loss and return the scores.

        Call it once for all micro-batches of an optimiser step. In a pipeline only the last stage calls `loss`.
        """
        found = []
        for number, each in enumerate(rows):
            scores = Scores(*self(*each))
            torch.autograd.backward(loss(number, scores))
            found.append(Scores(scores.logprobs_N.detach(), scores.entropies_N.detach()))
        return found

    def gradient_norm(self) -> float:
        """Return the norm of the whole model's gradient. Call it after the last `learn` of a step. A collective."""
        return total_norm(weight.grad for weight in self.parameters() if weight.grad is not None)
