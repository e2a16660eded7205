"""The result of an update: whether it stepped, its loss and norms, and a record of every trained token.

Axes: N trained tokens of the whole batch, in the order of the micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.batching.hindsight import HindsightFigures


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenRecord:
    """Figures of each trained token, on the CPU.

    `logprobs_N` and `entropy_N` are under the weights at the start of the step. `reference_N` is NaN without a
    reference, `values_N` and `returns_N` are NaN without a critic.
    """

    logprobs_N: Tensor
    reference_N: Tensor
    behaviour_N: Tensor
    entropy_N: Tensor
    weight_N: Tensor
    clipped_N: Tensor
    advantages_N: Tensor
    values_N: Tensor
    returns_N: Tensor
    staleness_N: Tensor
    trajectory_N: Tensor
    turn_N: Tensor
    altered_N: Tensor

    @staticmethod
    def concatenate(records: Sequence[TokenRecord]) -> TokenRecord:
        names = TokenRecord.__slots__
        return TokenRecord(**{name: torch.cat([getattr(record, name) for record in records]) for name in names})


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The result of one update.

    - `stepped`: at least one mini-batch had a finite gradient of a norm within `skip_norm`. Otherwise the weights are
      unchanged. `skipped` counts the mini-batches without such a gradient.
    - `loss` is the mean over the mini-batches; `gradient_norm` is the largest before clipping.
    - `value_loss` and `value_gradient_norm` are those of the critic; None without a critic.
    - `tokens` is None on all ranks but the first.
    - `entropy_threshold` is the least entropy of the tokens in the policy's loss; None if all tokens are in it.
    - `hindsight` are the figures of what feedback in words added; None if the algorithm does not learn from it, and
      on all ranks but the first.
    - `failure` is the error of a user's own loss that made a mini-batch be skipped; None on all ranks but the first.
    """

    stepped: bool
    skipped: int
    loss: float
    gradient_norm: float
    learning_rate: float
    tokens: TokenRecord | None
    value_loss: float | None = None
    value_gradient_norm: float | None = None
    entropy_threshold: float | None = None
    failure: str | None = None
    hindsight: HindsightFigures | None = None
