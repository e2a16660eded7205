"""The metrics of a training step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from proxy.contract.claim import SkipReason, TrajectoryAudit
from proxy.contract.turn import LogprobConvention
from trainer.algorithm.advantages import Advantages
from trainer.algorithm.divergence import divergence
from trainer.algorithm.value_loss import explained_variance
from trainer.batching.grouping import Batch
from trainer.batching.packing import MiniBatch
from trainer.batching.preparation import Prepared
from trainer.batching.staleness import has_reward, is_trained
from trainer.batching.teaching import Taught, taught_of
from trainer.config import Divergence
from trainer.observe.audits import combined_reward, comparable, quantile
from trainer.observe.clock import ELSEWHERE, WAITING
from trainer.update import Outcome, TokenRecord


def step_metrics(
    batch: Batch,
    advantages: Advantages,
    mini_batches: Sequence[MiniBatch],
    outcome: Outcome,
    audits: Sequence[TrajectoryAudit],
    seconds: Mapping[str, float],
) -> dict[str, float]:
    """Return the metrics of a trained step. `audits` are those of all trajectories that the commit consumes, skipped
    ones included. `seconds` are those of the phases since the metrics of the step before."""
    metrics = {
        **_of_batch(batch, advantages),
        **(_of_tokens(outcome.tokens) if outcome.tokens is not None else {}),
        **(_of_critic(batch, outcome, outcome.tokens) if outcome.tokens is not None else {}),
        **({"entropy_threshold": outcome.entropy_threshold} if outcome.entropy_threshold is not None else {}),
        **consumption(audits),
        **_of_layout(mini_batches),
        "loss": outcome.loss,
        "gradient_norm": outcome.gradient_norm,
        "skipped_steps": float(outcome.skipped),
        "learning_rate": outcome.learning_rate,
        **{f"seconds_{phase}": value for phase, value in seconds.items()},
    }
    total, waiting = sum(seconds.values()), seconds.get(WAITING, 0.0)
    working = total - waiting - seconds.get(ELSEWHERE, 0.0)
    if working > 0:
        metrics["tokens_per_second"] = metrics["tokens"] / working
        metrics["trainer_idle_ratio"] = waiting / total
    return metrics


def signal_metrics(prepared: Prepared, *, extra_claims: int) -> dict[str, float]:
    """Return the share of claimed trajectories without a signal, and the number of claims by which the batch was
    filled up."""
    silent = len(prepared.left_out) + sum(not any(turns) for turns in prepared.advantages.turns)
    metrics = {
        "left_out": float(len(prepared.left_out)),
        "extra_claims": float(extra_claims),
        "levelled_groups": float(prepared.levelled),
    }
    if not prepared.advantages.for_critic:  # a critic's advantages are per token, and known only after the update
        usable = len(prepared.left_out) + len(prepared.batch.trajectories)
        metrics["without_signal_share"] = silent / usable
    return metrics


def consumption(audits: Sequence[TrajectoryAudit]) -> dict[str, float]:
    """Count the trajectories that a commit consumes, the skipped ones by reason, and the trained tokens."""
    reasons = Counter(audit.skipped for audit in audits if audit.skipped is not None)
    return {
        "trajectories": float(len(audits)),
        "tokens": float(sum(audit.trained_tokens for audit in audits)),
        **{f"skipped_{reason.value}": float(reasons[reason.value]) for reason in SkipReason},
    }


def _of_batch(batch: Batch, advantages: Advantages) -> dict[str, float]:
    # Sessions that have only feedback in words have no reward, which is not a reward of 0.
    rewarded = [combined_reward(each) for each in batch.trajectories if has_reward(each)]
    rewards = torch.tensor(rewarded or [0.0], dtype=torch.float64)
    values = torch.tensor(
        [
            value
            for trajectory, turns in zip(batch.trajectories, advantages.turns, strict=True)
            for turn, value in zip(trajectory.turns, turns, strict=True)
            if is_trained(turn)
        ],
        dtype=torch.float64,
    )
    trained = [turn for trajectory in batch.trajectories for turn in trajectory.turns if is_trained(turn)]
    superseded = sum(turn.superseded for trajectory in batch.trajectories for turn in trajectory.turns)
    cut = sum(turn.convention is LogprobConvention.UNTRUNCATED for turn in trained)
    constrained = sum(turn.convention is LogprobConvention.CONSTRAINED for turn in trained)
    return {
        "reward_mean": rewards.mean().item(),
        "reward_std": rewards.std(correction=0).item(),
        "advantage_mean": values.mean().item(),
        "advantage_std": values.std(correction=0).item(),
        "advantage_min": values.min().item(),
        "advantage_max": values.max().item(),
        "without_signal_share": sum(not any(turns) for turns in advantages.turns) / len(advantages.turns),
        "baseline_fallbacks": float(advantages.fallbacks.trajectories),
        "baseline_fallbacks_without_task": float(advantages.fallbacks.without_task),
        "baseline_fallback_turns": float(advantages.fallbacks.turns),
        "groups": float(len(set(batch.groups))),
        "untruncated_logprob_share": cut / len(trained),
        "constrained_turn_share": constrained / len(trained),
        "superseded_turns": float(superseded),
    }


def _of_layout(mini_batches: Sequence[MiniBatch]) -> dict[str, float]:
    """Return the tokens of the sequences, and the tokens that the model computes for them: with padding, and with
    shared prefixes once."""
    parts = [part for mini_batch in mini_batches for part in mini_batch.micro_batches]
    return {
        "tokens_in_sequences": float(sum(part.sequence_tokens for part in parts)),
        "tokens_computed": float(sum(part.input_ids_BT.numel() for part in parts)),
        "micro_batches": float(len(parts)),
    }


def _of_tokens(tokens: TokenRecord) -> dict[str, float]:
    difference_N = (tokens.logprobs_N - tokens.behaviour_N).double()
    ratio_N = difference_N.exp()
    comparable_N = comparable(difference_N, tokens.altered_N)
    gap_N = comparable_N.abs()
    return {
        **{f"ratio_{name}": value for name, value in _quantiles(ratio_N).items()},
        "clipped_share": tokens.clipped_N.double().mean().item(),
        "importance_weight_mean": tokens.weight_N.double().mean().item(),
        # k3 (Schulman 2020) of the current policy against the behaviour policy.
        "kl_behaviour": (comparable_N.exp() - 1 - comparable_N).mean().item(),
        **_divergence(tokens),
        "entropy": tokens.entropy_N.double().mean().item(),
        "logprob_gap_mean": gap_N.mean().item(),
        "logprob_gap_max": gap_N.max().item(),
        **_fresh_gap(difference_N, tokens),
        **_staleness(tokens.staleness_N),
    }


def _of_critic(batch: Batch, outcome: Outcome, tokens: TokenRecord) -> dict[str, float]:
    """Return the metrics of a critic: its advantages per token, and the share of the returns' variance that its
    values explain."""
    if outcome.value_loss is None or outcome.value_gradient_norm is None:
        return {}
    advantages_N = tokens.advantages_N.double()
    taught = set(tokens.trajectory_N[advantages_N != 0].tolist())
    return {
        "advantage_mean": advantages_N.mean().item(),
        "advantage_std": advantages_N.std(correction=0).item(),
        "advantage_min": advantages_N.min().item(),
        "advantage_max": advantages_N.max().item(),
        "without_signal_share": 1 - len(taught) / len(batch.trajectories),
        "value_loss": outcome.value_loss,
        "value_gradient_norm": outcome.value_gradient_norm,
        "value_mean": tokens.values_N.double().mean().item(),
        "explained_variance": explained_variance(tokens.values_N, tokens.returns_N),
    }


def divergence_from_teacher(outcome: Outcome, taught: Taught | None) -> dict[str, float]:
    """Return the mean of logp − teacher over the trained tokens, before the step; nothing without a teacher."""
    tokens = outcome.tokens
    if taught is None or tokens is None:
        return {}
    teacher_N = taught_of(tokens.trajectory_N, tokens.turn_N, taught)
    return {"kl_teacher": (tokens.logprobs_N - teacher_N).double().mean().item()}


def hindsight_metrics(outcome: Outcome) -> dict[str, float]:
    """Return what feedback in words added; nothing if the algorithm does not learn from it."""
    figures = outcome.hindsight
    if figures is None:
        return {}
    return {
        "hindsight_answers": float(figures.answers),
        "hindsight_ignored": float(figures.ignored),
        "hindsight_shift": figures.distance / figures.tokens if figures.tokens else 0.0,
    }


def _divergence(tokens: TokenRecord) -> dict[str, float]:
    """Return the divergence from the reference; nothing without one."""
    if not bool(tokens.reference_N.isfinite().all()):
        return {}
    return {"kl_reference": divergence(Divergence.K3, tokens.logprobs_N, tokens.reference_N).double().mean().item()}


def _fresh_gap(difference_N: Tensor, tokens: TokenRecord) -> dict[str, float]:
    """Return the gap of the tokens of the head's own version; nothing if there is none."""
    fresh_N = (tokens.staleness_N <= 0) & ~tokens.altered_N
    if not bool(fresh_N.any()):
        return {}
    return {"logprob_gap_fresh": difference_N[fresh_N].abs().mean().item()}


def _quantiles(values_N: Tensor) -> dict[str, float]:
    ordered_N = values_N.sort().values
    points = {"min": 0.0, "p01": 0.01, "median": 0.5, "p99": 0.99, "max": 1.0}
    return {name: quantile(ordered_N, point) for name, point in points.items()}


def _staleness(staleness_N: Tensor) -> dict[str, float]:
    """Return the mean, the maximum and the share of tokens per version of staleness."""
    counts = torch.bincount(staleness_N.clamp(min=0).long())
    shares = {f"staleness_share_{age}": count / staleness_N.numel() for age, count in enumerate(counts.tolist())}
    return {"staleness_mean": staleness_N.mean().item(), "staleness_max": staleness_N.max().item(), **shares}
