"""Numbers of a training step: seconds per phase, its metrics and an audit per trajectory."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.profiler import record_function

from proxy.contract.claim import TrajectoryAudit
from proxy.contract.trajectory import Trajectory
from proxy.contract.turn import LogprobConvention
from trainer.algorithm.advantages import Advantages
from trainer.algorithm.divergence import divergence
from trainer.algorithm.value_loss import explained_variance
from trainer.batching.grouping import Batch
from trainer.batching.packing import MiniBatch
from trainer.batching.preparation import Prepared
from trainer.batching.staleness import Skip, is_trained
from trainer.batching.teaching import Taught, taught_of
from trainer.config import Divergence
from trainer.update import Outcome, TokenRecord

WAITING, ELSEWHERE = "claim", "other_runs"
"""Phases of a run's step in which the trainer waits for trajectories, and in which it trains other runs."""


class PhaseClock:
    """Seconds per named phase. In a profiler's trace a phase is a range of its name."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._phase: str | None = None
        self._began = 0.0
        self._range: record_function | None = None

    def begin(self, phase: str) -> None:
        """Ends the phase before."""
        self.end()
        self._phase, self._began = phase, time.perf_counter()
        self._range = record_function(phase)
        self._range.__enter__()  # type: ignore[no-untyped-call]

    def end(self) -> None:
        self._count()
        self._phase = None
        if self._range is not None:
            self._range.__exit__(None, None, None)
            self._range = None

    def add(self, phase: str, seconds: float) -> None:
        """Add seconds of a phase that the caller measured."""
        self._seconds[phase] = self._seconds.get(phase, 0.0) + seconds

    def take(self) -> dict[str, float]:
        """The seconds of all phases since the last `take`."""
        self._count()
        taken, self._seconds = self._seconds, {}
        return taken

    def _count(self) -> None:
        if self._phase is not None:
            now = time.perf_counter()
            self.add(self._phase, now - self._began)
            self._began = now


def combined_reward(trajectory: Trajectory) -> float:
    """The session's reward; the sum of its turns' where only turns were rewarded."""
    if trajectory.reward is not None:
        return trajectory.reward
    return sum(turn.reward for turn in trajectory.turns if turn.reward is not None)


def audit_skipped(trajectory: Trajectory, reason: Skip) -> TrajectoryAudit:
    """The audit of a trajectory that was consumed and taught nothing."""
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
    """Return one audit per trajectory that was claimed and is not part of the batch."""
    dropped = [audit_skipped(trajectory, reason) for trajectory, reason in prepared.dropped]
    return [*dropped, *(audit_skipped(trajectory, Skip.NO_SIGNAL) for trajectory in prepared.left_out)]


def why_skipped(outcome: Outcome) -> Skip:
    """Return why a batch whose update took no step taught nothing."""
    if outcome.failure is not None:
        return Skip.USER_FUNCTION_FAILED
    return Skip.EXPLODED_GRADIENT if math.isfinite(outcome.gradient_norm) else Skip.NON_FINITE_GRADIENT


def audit_all_skipped(batch: Batch, reason: Skip) -> list[TrajectoryAudit]:
    return [audit_skipped(trajectory, reason) for trajectory in batch.trajectories]


def audit_trained(batch: Batch, advantages: Advantages, tokens: TokenRecord | None) -> list[TrajectoryAudit]:
    """One audit per trajectory of a trained batch, in its order; none on a rank without the token record."""
    if tokens is None:
        return []
    order_N = torch.argsort(tokens.trajectory_N, stable=True)
    counts = torch.bincount(tokens.trajectory_N, minlength=len(batch.trajectories)).tolist()
    difference_N = (tokens.logprobs_N - tokens.behaviour_N)[order_N]
    credited = _per_trajectory(tokens, len(counts)) if advantages.for_critic else _of_trajectories(batch, advantages)
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
        gap = _comparable(difference, altered).abs()
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
                ratio_p05=_quantile(ratio.sort().values, 0.05),
                ratio_p95=_quantile(ratio.sort().values, 0.95),
            )
        )
    return audits


def _of_trajectories(batch: Batch, advantages: Advantages) -> list[float]:
    """Return the session's advantage of each trajectory; the mean over its turns where turns have rewards."""
    return [
        session if all(turn.reward is None for turn in trajectory.turns) else sum(turns) / len(turns)
        for trajectory, session, turns in zip(batch.trajectories, advantages.session, advantages.turns, strict=True)
    ]


def step_metrics(
    batch: Batch,
    advantages: Advantages,
    mini_batches: Sequence[MiniBatch],
    outcome: Outcome,
    audits: Sequence[TrajectoryAudit],
    seconds: Mapping[str, float],
) -> dict[str, float]:
    """The metrics of a trained step. `audits` are all that the commit consumes, skipped ones included; `seconds` are
    of the phases since the metrics of the step before."""
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
    """Return how much of what was claimed had a signal, and by how many further claims the batch was filled up."""
    silent = len(prepared.left_out) + sum(not any(turns) for turns in prepared.advantages.turns)
    metrics = {
        "left_out": float(len(prepared.left_out)),
        "extra_claims": float(extra_claims),
        "levelled_groups": float(prepared.levelled),
    }
    if not prepared.advantages.for_critic:  # whose advantages are per token, and known later
        usable = len(prepared.left_out) + len(prepared.batch.trajectories)
        metrics["without_signal_share"] = silent / usable
    return metrics


def consumption(audits: Sequence[TrajectoryAudit]) -> dict[str, float]:
    """Count the trajectories that a commit consumes, the skipped ones by reason, and the trained tokens."""
    reasons = Counter(audit.skipped for audit in audits if audit.skipped is not None)
    return {
        "trajectories": float(len(audits)),
        "tokens": float(sum(audit.trained_tokens for audit in audits)),
        **{f"skipped_{reason.value}": float(reasons[reason.value]) for reason in Skip},
    }


def _of_batch(batch: Batch, advantages: Advantages) -> dict[str, float]:
    rewards = torch.tensor([combined_reward(trajectory) for trajectory in batch.trajectories], dtype=torch.float64)
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
    """Tokens of the sequences, and those that the model is given for them: padding more, less what stands once."""
    parts = [part for mini_batch in mini_batches for part in mini_batch.micro_batches]
    return {
        "tokens_in_sequences": float(sum(part.sequence_tokens for part in parts)),
        "tokens_computed": float(sum(part.input_ids_BT.numel() for part in parts)),
        "micro_batches": float(len(parts)),
    }


def _of_tokens(tokens: TokenRecord) -> dict[str, float]:
    difference_N = (tokens.logprobs_N - tokens.behaviour_N).double()
    ratio_N = difference_N.exp()
    comparable_N = _comparable(difference_N, tokens.altered_N)
    gap_N = comparable_N.abs()
    return {
        **{f"ratio_{name}": value for name, value in _quantiles(ratio_N).items()},
        "clipped_share": tokens.clipped_N.double().mean().item(),
        "importance_weight_mean": tokens.weight_N.double().mean().item(),
        # k3 of Schulman 2020, of the current policy against the one that acted.
        "kl_behaviour": (comparable_N.exp() - 1 - comparable_N).mean().item(),
        **_divergence(tokens),
        "entropy": tokens.entropy_N.double().mean().item(),
        "logprob_gap_mean": gap_N.mean().item(),
        "logprob_gap_max": gap_N.max().item(),
        **_fresh_gap(difference_N, tokens),
        **_staleness(tokens.staleness_N),
    }


def _of_critic(batch: Batch, outcome: Outcome, tokens: TokenRecord) -> dict[str, float]:
    """Return the metrics of a critic: its advantages per token, and how much of the returns it had foreseen."""
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


def _per_trajectory(tokens: TokenRecord, trajectories: int) -> list[float]:
    """The mean advantage of each one's tokens."""
    sums = torch.zeros(trajectories, dtype=torch.float64)
    sums.index_add_(0, tokens.trajectory_N, tokens.advantages_N.double())
    means: list[float] = (sums / torch.bincount(tokens.trajectory_N, minlength=trajectories)).tolist()
    return means


def divergence_from_teacher(outcome: Outcome, taught: Taught | None) -> dict[str, float]:
    """The mean of logp − teacher over the trained tokens, before the step; nothing where there is no teacher."""
    tokens = outcome.tokens
    if taught is None or tokens is None:
        return {}
    teacher_N = taught_of(tokens.trajectory_N, tokens.turn_N, taught)
    return {"kl_teacher": (tokens.logprobs_N - teacher_N).double().mean().item()}


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


def _comparable(difference_N: Tensor, altered_N: Tensor) -> Tensor:
    """Return the differences of log-probabilities where the trainer's and the engine's are of the same distribution;
    all differences if there is no such token."""
    same_N = ~altered_N
    return difference_N[same_N] if bool(same_N.any()) else difference_N


def _quantiles(values_N: Tensor) -> dict[str, float]:
    ordered_N = values_N.sort().values
    points = {"min": 0.0, "p01": 0.01, "median": 0.5, "p99": 0.99, "max": 1.0}
    return {name: _quantile(ordered_N, point) for name, point in points.items()}


def _quantile(ordered_N: Tensor, point: float) -> float:
    return ordered_N[round(point * (ordered_N.numel() - 1))].item()


def _staleness(staleness_N: Tensor) -> dict[str, float]:
    """Mean, maximum and the share of tokens per version of staleness."""
    counts = torch.bincount(staleness_N.clamp(min=0).long())
    shares = {f"staleness_share_{age}": count / staleness_N.numel() for age, count in enumerate(counts.tolist())}
    return {"staleness_mean": staleness_N.mean().item(), "staleness_max": staleness_N.max().item(), **shares}
