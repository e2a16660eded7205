"""What a reward is compared with, and in which unit: pure functions over the rewards of one batch.

Axes: N rewarded trajectories. `groups_N` holds one index per trajectory, equal for members of one group; a
trajectory of no group has an index of its own. Groups may be ragged. All reals are float64.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.config import Baseline, Scale

_STD_FLOOR = 1e-4


@dataclass(frozen=True, kw_only=True, slots=True)
class RunningMean:
    """Exponential mean over trajectories, in order of training. `value` None: nothing was seen yet."""

    decay: float
    value: float | None = None

    @property
    def baseline(self) -> float:
        """0 before anything was seen, so that the first reward pushes in the direction of its sign."""
        return 0.0 if self.value is None else self.value

    def updated(self, rewards_N: Tensor) -> RunningMean:
        """After a batch, whose N rewards count alike: its mean enters with weight 1 − decayᴺ."""
        count = rewards_N.numel()
        if count == 0:
            return self
        mean = rewards_N.double().mean().item()
        kept = self.decay**count
        return RunningMean(
            decay=self.decay, value=mean if self.value is None else kept * self.value + (1 - kept) * mean
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """`fallback_N` marks trajectories that had nobody to be compared with and met the running mean instead."""

    baseline_N: Tensor
    fallback_N: Tensor


def baseline(kind: Baseline, rewards_N: Tensor, groups_N: Tensor, running: RunningMean) -> Comparison:
    """The baseline of every trajectory.

    `group_mean` and `batch_mean` include the trajectory itself, `leave_one_out` does not. A group (or batch) of one
    falls back to the running mean of earlier batches, as its own mean would make every advantage zero.
    """
    count = rewards_N.numel()
    running_N = torch.full_like(rewards_N, running.baseline)
    nobody_N = torch.zeros(count, dtype=torch.bool)
    if kind in (Baseline.NONE, Baseline.CRITIC):  # a critic's is per token, and taken away later
        return Comparison(baseline_N=torch.zeros_like(rewards_N), fallback_N=nobody_N)
    if kind is Baseline.RUNNING_MEAN:
        return Comparison(baseline_N=running_N, fallback_N=nobody_N)
    if kind is Baseline.BATCH_MEAN:
        alone_N = torch.full((count,), count == 1)
        return Comparison(baseline_N=torch.where(alone_N, running_N, rewards_N.mean()), fallback_N=alone_N)
    sizes_N, means_N, _ = _group_statistics(rewards_N, groups_N)
    alone_N = sizes_N == 1
    if kind is Baseline.LEAVE_ONE_OUT:
        means_N = (means_N * sizes_N - rewards_N) / (sizes_N - 1).clamp(min=1)
    return Comparison(baseline_N=torch.where(alone_N, running_N, means_N), fallback_N=alone_N)


def scale(kind: Scale, rewards_N: Tensor, groups_N: Tensor) -> Tensor:
    """What to divide by, per trajectory: a population standard deviation plus a floor of 1e-4, or 1.

    A group or batch of one has no spread and is not scaled.
    """
    ones_N = torch.ones_like(rewards_N)
    if kind is Scale.NONE or rewards_N.numel() == 0:
        return ones_N
    if kind is Scale.BATCH_STD:
        return ones_N if rewards_N.numel() == 1 else ones_N * (rewards_N.std(correction=0) + _STD_FLOOR)
    sizes_N, _, std_N = _group_statistics(rewards_N, groups_N)
    return torch.where(sizes_N == 1, ones_N, std_N + _STD_FLOOR)


def _group_statistics(rewards_N: Tensor, groups_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Size, mean and population standard deviation of each trajectory's group.

    A group of equal rewards has exactly their value as its mean: rounding must not invent an advantage.
    """
    _, index_N, sizes_G = torch.unique(groups_N, return_inverse=True, return_counts=True)
    groups = sizes_G.numel()

    def per_group(values_N: Tensor) -> Tensor:
        return torch.zeros(groups, dtype=rewards_N.dtype).index_add_(0, index_N, values_N)

    lowest_G = torch.full((groups,), torch.inf, dtype=rewards_N.dtype).scatter_reduce_(0, index_N, rewards_N, "amin")
    means_G = lowest_G + per_group(rewards_N - lowest_G[index_N]) / sizes_G
    std_G = (per_group((rewards_N - means_G[index_N]) ** 2) / sizes_G).sqrt()
    return sizes_G[index_N].to(rewards_N.dtype), means_G[index_N], std_G[index_N]
