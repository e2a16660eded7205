"""Tables of training steps for the terminal, made from answers of the operating API without side effects."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from proxy.admin.formatting import ABSENT, number, percent, reward, seconds, words
from proxy.cli.drawing import plain_table, session_label

_HEAD = (
    "loss",
    "gradient_norm",
    "learning_rate",
    "entropy",
    "kl_behaviour",
    "kl_reference",
    "ratio_p01",
    "ratio_median",
    "ratio_p99",
    "clipped_share",
    "importance_weight_mean",
    "logprob_gap_mean",
    "logprob_gap_max",
    "advantage_mean",
    "advantage_std",
    "baseline_fallbacks",
    "baseline_fallbacks_without_task",
    "cut_answer_share",
)
_PHASE = "seconds_"


def steps_table(steps: Sequence[dict[str, Any]]) -> Table:
    table = plain_table(
        *("version", "state", "trajectories", "tokens", "reward"), *("staleness", "gradient", "swap", "weights")
    )
    for step in steps:
        metrics = step["metrics"]
        table.add_row(
            f"v{step['version']}",
            step["state"],
            str(step["trajectories"]),
            str(step["trained_tokens"]),
            reward(step["reward_mean"]),
            number(step["staleness_mean"]),
            number(metrics.get("gradient_norm"), 4),
            seconds(step["swap_seconds"]),
            _weights(step),
        )
    return table


def draw_step(view: dict[str, Any]) -> Iterator[RenderableType]:
    """Draw a step. `view` is the answer of `GET …/steps/{version}`."""
    step = view["step"]
    parent = step["parent_version"]
    origin = "the base model" if parent is None else f"made from v{parent}"
    yield Text(f"version {step['version']} of {view['run']}, {step['state']}, {origin}")
    if step["rejected_because"] is not None:
        yield Text(f"{step['state'].replace('_', ' ')}: {step['rejected_because']}", style="red")
    if view["rewards_revised"]:
        yield Text(f"{view['rewards_revised']} of its trajectories have other rewards now", style="bold yellow")
    yield _facts(view)
    for group, members in groupby(view["trajectories"], key=_group_of):
        yield Text(f"\n{group}", style="bold")
        yield _trajectories(list(members))


def _facts(view: dict[str, Any]) -> Table:
    step, metrics = view["step"], view["step"]["metrics"]
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="dim")
    table.add_column()
    table.add_row("weights", _weights(step))
    table.add_row("trajectories", f"{step['trajectories']}, {step['trained_tokens']} trained tokens")
    for name in _HEAD:
        if name in metrics:
            table.add_row(words(name), ABSENT if metrics[name] is None else f"{metrics[name]:.6g}")
    left_out = {name: value for name, value in metrics.items() if name.startswith(("masked_", "skipped_")) and value}
    for name, value in left_out.items():
        table.add_row(words(name), f"{value:.0f}")
    phases = {name: value for name, value in metrics.items() if name.startswith(_PHASE) and value is not None}
    if phases:
        table.add_row("times", ", ".join(f"{words(n.removeprefix(_PHASE))} {seconds(v)}" for n, v in phases.items()))
    if view["inputs"] is not None:
        conditions = view["inputs"]["conditions"]
        table.add_row(
            "made with",
            f"torch {conditions['torch']} on {conditions['device_name']}, {conditions['threads']} threads,"
            f" {conditions['ranks']} ranks; seed {view['seed']}; configuration {str(view['config_hash'])[:12]}",
        )
    return table


def _group_of(entry: dict[str, Any]) -> str:
    name = entry["group"] if entry["group"] is not None else "sessions of no group"
    return f"{name} (kept: its batch taught nothing by itself)" if entry["kept"] else name


def _trajectories(entries: Sequence[dict[str, Any]]) -> Table:
    table = plain_table(
        "session",
        "reward",
        "now",
        "advantage",
        "tokens",
        "stale",
        "ratio 5/50/95 %",
        "clipped",
        "gap",
        ids=("session",),
    )
    for entry in entries:
        audit = entry["audit"]
        if audit["skipped"] is not None:
            table.add_row(
                _session(entry),
                _used(entry),
                _now(entry),
                f"skipped: {words(audit['skipped'])}",
                "",
                "",
                "",
                "",
                "",
            )
            continue
        ratios = (audit[f"ratio_{name}"] for name in ("p05", "median", "p95"))
        table.add_row(
            _session(entry),
            _used(entry),
            _now(entry),
            number(audit["advantage"], 3),
            _trained(audit),
            number(audit["staleness_mean"]),
            "/".join(number(ratio) for ratio in ratios),
            percent(audit["clipped_share"]),
            ABSENT if audit["logprob_gap_max"] is None else f"{audit['logprob_gap_max']:.1e}",
        )
    return table


def _trained(audit: dict[str, Any]) -> str:
    """Return the number of trained tokens, and how many answers were left out."""
    masked = audit["masked"]
    if not masked:
        return str(audit["trained_tokens"])
    reasons = ", ".join(dict.fromkeys(words(turn["reason"]) for turn in masked))
    return f"{audit['trained_tokens']} ({len(masked)} masked: {reasons})"


def _session(entry: dict[str, Any]) -> str:
    return session_label(entry["audit"]["session_id"], entry["external_id"])


def _used(entry: dict[str, Any]) -> str:
    """Return the reward, with its components if there are several."""
    total = reward(entry["audit"]["reward"])
    if len(entry["rewards"]) < 2:
        return total
    parts = ", ".join(
        f"{used['name']}{' of a turn' if used['turn_id'] else ''} {reward(used['value'])}"
        for used in entry["rewards"]
    )
    return f"{total} ({parts})"


def _now(entry: dict[str, Any]) -> str:
    changed = [
        f"{used['name']} {reward(used['value'])} → {reward(used['value_now'])}"
        for used in entry["rewards"]
        if used["value_now"] is not None
    ]
    if not entry["revised"]:
        return ""
    return f"now {reward(entry['reward_now'])}" + (f" ({', '.join(changed)})" if changed else "")


def _weights(step: dict[str, Any]) -> str:
    if step["weights"] is None:
        return "the base model's"
    if step["weights_removed_at"] is not None:
        return "deleted"
    if step["rejected_because"] is not None:
        return str(step["rejected_because"])
    return str(step["weights"]["sha256"])[:12]
