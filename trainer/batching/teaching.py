"""What a teacher gives to the tokens of a batch, in the order of a micro-batch.

Axes: N trained tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

Taught = Mapping[tuple[int, int], Sequence[float]]
"""By a trajectory's index in the batch and a turn's in it: log-probabilities of the tokens that are learnt."""


def taught_of(trajectory_N: Tensor, turn_N: Tensor, taught: Taught) -> Tensor:
    """N log-probabilities of the teacher, float32 on the CPU. Turns are whole, one after the other."""
    keys = list(dict.fromkeys(zip(trajectory_N.tolist(), turn_N.tolist(), strict=True)))
    return torch.tensor([logprob for key in keys for logprob in taught[key]], dtype=torch.float32)
