"""The names of a step's metrics, with their units; docs/reference.md explains them."""

from __future__ import annotations

from collections.abc import Mapping

from proxy.contract.claim import AnswerFault, SkipReason

_REWARD, _RATIO, _SHARE, _NATS, _COUNT, _SECONDS = "reward", "ratio", "share", "nats", "count", "seconds"

UNITS: Mapping[str, str] = {
    "reward_mean": _REWARD,
    "reward_std": _REWARD,
    "advantage_mean": "advantage",
    "advantage_std": "advantage",
    "advantage_min": "advantage",
    "advantage_max": "advantage",
    "without_signal_share": _SHARE,
    "left_out": _COUNT,
    "extra_claims": _COUNT,
    "levelled_groups": _COUNT,
    "baseline_fallbacks": _COUNT,
    "baseline_fallbacks_without_task": _COUNT,
    "baseline_fallback_turns": _COUNT,
    "groups": _COUNT,
    "answers": _COUNT,
    "cut_answer_share": _SHARE,
    **{f"masked_{fault.value}": _COUNT for fault in AnswerFault},
    "untruncated_logprob_share": _SHARE,
    "constrained_turn_share": _SHARE,
    "superseded_turns": _COUNT,
    "ratio_min": _RATIO,
    "ratio_p01": _RATIO,
    "ratio_median": _RATIO,
    "ratio_p99": _RATIO,
    "ratio_max": _RATIO,
    "clipped_share": _SHARE,
    "importance_weight_mean": _RATIO,
    "kl_behaviour": _NATS,
    "kl_reference": _NATS,
    "kl_teacher": _NATS,
    "entropy": _NATS,
    "entropy_threshold": _NATS,
    "logprob_gap_mean": _NATS,
    "logprob_gap_max": _NATS,
    "logprob_gap_fresh": _NATS,
    "mismatch_warning": _NATS,
    "staleness_mean": "versions",
    "staleness_max": "versions",
    "staleness_share_N": _SHARE,
    "trajectories": _COUNT,
    "tokens": _COUNT,
    "tokens_in_sequences": _COUNT,
    "tokens_computed": _COUNT,
    "micro_batches": _COUNT,
    **{f"skipped_{reason.value}": _COUNT for reason in SkipReason},
    "loss": "loss",
    "gradient_norm": "norm",
    "value_loss": "loss",
    "value_gradient_norm": "norm",
    "value_mean": _REWARD,
    "explained_variance": _SHARE,
    "skipped_steps": _COUNT,
    "oom_splits": _COUNT,
    "learning_rate": _RATIO,
    "tokens_per_second": "tokens/s",
    "trainer_idle_ratio": _SHARE,
    "engine_idle_ratio": _SHARE,
    "mfu": _SHARE,
    "seconds_claim": _SECONDS,
    "seconds_other_runs": _SECONDS,
    "seconds_prepare": _SECONDS,
    "seconds_update": _SECONDS,
    "seconds_publish_and_commit": _SECONDS,
    "seconds_resume": _SECONDS,
}
"""`N` stands for a number of versions."""


def name_in_table(metric: str) -> str:
    """Return the name under which `UNITS` has the metric: `staleness_share_N` for `staleness_share_3`."""
    stem, _, last = metric.rpartition("_")
    return f"{stem}_N" if last.isdecimal() else metric
