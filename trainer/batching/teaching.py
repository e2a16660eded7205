"""A teacher's log-probabilities of a batch, in the order of a micro-batch's tokens.

Axes: N trained tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

Taught = Mapping[tuple[int, int], Sequence[float]]
"""Log-probabilities of the trained tokens, by (index of the trajectory in the batch, index of the turn in it)."""


def taught_of(trajectory_N: Tensor, turn_N: Tensor, taught: Taught) -> Tensor:
    """Return the teacher's N log-probabilities, float32 on the CPU. Every turn must be whole in the micro-batch."""
    keys = list(dict.fromkeys(zip(trajectory_N.tolist(), turn_N.tolist(), strict=True)))
    return torch.tensor([logprob for key in keys for logprob in taught[key]], dtype=torch.float32)
