"""Audits of trajectories: how each was trained, or why it was not."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from proxy.contract.claim import SkipReason, TrajectoryAudit
from proxy.contract.trajectory import Trajectory
from trainer.algorithm.advantages import Advantages
from trainer.batching.grouping import Batch
from trainer.batching.preparation import Prepared
from trainer.update import Outcome, TokenRecord


def combined_reward(trajectory: Trajectory) -> float:
    """Return the session's reward, or the sum of its turns' rewards if the session has none."""
    if trajectory.reward is not None:
        return trajectory.reward
    return sum(turn.reward for turn in trajectory.turns if turn.reward is not None)


def audit_skipped(trajectory: Trajectory, reason: SkipReason) -> TrajectoryAudit:
    """Return the audit of a trajectory that was consumed and not trained."""
    return TrajectoryAudit(
        session_id=trajectory.session_id,
        reward=combined_reward(trajectory),
        advantage=0.0,
        trained_tokens=0,
        staleness_mean=0.0,
        staleness_max=0,
        logprob_gap_mean=0.0,
        logprob_gap_max=0.0,
        ratio_min=1.0,
        ratio_median=1.0,
        ratio_max=1.0,
        clipped_share=0.0,
        skipped=reason.value,
    )


def audit_untrained(prepared: Prepared) -> list[TrajectoryAudit]:
    """Return one audit per trajectory that was claimed and is not in the batch."""
    dropped = [audit_skipped(trajectory, reason) for trajectory, reason in prepared.dropped]
    return [*dropped, *(audit_skipped(trajectory, SkipReason.NO_SIGNAL) for trajectory in prepared.left_out)]


def why_skipped(outcome: Outcome) -> SkipReason:
    """Return why a batch whose update took no step taught nothing."""
    if outcome.failure is not None:
        return SkipReason.USER_FUNCTION_FAILED
    return SkipReason.EXPLODED_GRADIENT if math.isfinite(outcome.gradient_norm) else SkipReason.NON_FINITE_GRADIENT


def audit_all_skipped(batch: Batch, reason: SkipReason) -> list[TrajectoryAudit]:
    return [audit_skipped(trajectory, reason) for trajectory in batch.trajectories]


def audit_trained(batch: Batch, advantages: Advantages, tokens: TokenRecord | None) -> list[TrajectoryAudit]:
    """Return one audit per trajectory of a trained batch, in its order; none on a rank without the token record."""
    if tokens is None:
        return []
    order_N = torch.argsort(tokens.trajectory_N, stable=True)
    counts = torch.bincount(tokens.trajectory_N, minlength=len(batch.trajectories)).tolist()
    difference_N = (tokens.logprobs_N - tokens.behaviour_N)[order_N]
    credited = per_trajectory(tokens, len(counts)) if advantages.for_critic else _of_trajectories(batch, advantages)
    columns = zip(
        torch.split(difference_N, counts),
        torch.split(tokens.altered_N[order_N], counts),
        torch.split(tokens.staleness_N[order_N], counts),
        torch.split(tokens.clipped_N[order_N], counts),
        strict=True,
    )
    audits = []
    for index, (difference, altered, staleness, clipped) in enumerate(columns):
        ratio = difference.exp()
        gap = comparable(difference, altered).abs()
        audits.append(
            TrajectoryAudit(
                session_id=batch.trajectories[index].session_id,
                reward=combined_reward(batch.trajectories[index]),
                advantage=credited[index],
                trained_tokens=counts[index],
                staleness_mean=staleness.mean().item(),
                staleness_max=int(staleness.max().item()),
                logprob_gap_mean=gap.mean().item(),
                logprob_gap_max=gap.max().item(),
                ratio_min=ratio.min().item(),
                ratio_median=ratio.median().item(),
                ratio_max=ratio.max().item(),
                clipped_share=clipped.float().mean().item(),
                ratio_p05=quantile(ratio.sort().values, 0.05),
                ratio_p95=quantile(ratio.sort().values, 0.95),
            )
        )
    return audits


def _of_trajectories(batch: Batch, advantages: Advantages) -> list[float]:
    """Return the session's advantage of each trajectory, or the mean over its turns if turns have rewards."""
    return [
        session if all(turn.reward is None for turn in trajectory.turns) else sum(turns) / len(turns)
        for trajectory, session, turns in zip(batch.trajectories, advantages.session, advantages.turns, strict=True)
    ]


def per_trajectory(tokens: TokenRecord, trajectories: int) -> list[float]:
    """Return the mean advantage over the tokens of each trajectory."""
    sums = torch.zeros(trajectories, dtype=torch.float64)
    sums.index_add_(0, tokens.trajectory_N, tokens.advantages_N.double())
    means: list[float] = (sums / torch.bincount(tokens.trajectory_N, minlength=trajectories)).tolist()
    return means


def comparable(difference_N: Tensor, altered_N: Tensor) -> Tensor:
    """Return the differences of log-probabilities at tokens that trainer and engine score under the same
    distribution; all differences if there is no such token."""
    same_N = ~altered_N
    return difference_N[same_N] if bool(same_N.any()) else difference_N


def quantile(ordered_N: Tensor, point: float) -> float:
    """Return the nearest of the sorted values to a quantile; `point` is between 0 and 1."""
    return ordered_N[round(point * (ordered_N.numel() - 1))].item()
