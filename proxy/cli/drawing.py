"""Drawings for the terminal: tables, a sparkline, the live table of a run, transcripts."""

from __future__ import annotations

import itertools
import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

_BARS = "▁▂▃▄▅▆▇█"
_ID_WIDTH = 30
# With the text beside it, the line of rewards fits a terminal of 80 columns.
_LIVE_BARS = 40


def session_label(session_id: str, name: str | None) -> str:
    """Return a session's id with the client's own name for it, if it has one."""
    return session_id if name is None else f"{session_id} {name}"


def plain_table(*headings: str, ids: Collection[str] = ()) -> Table:
    """Return a table without rules, which wraps text instead of cutting it off on a narrow terminal.

    Columns named in `ids` contain ids and are never wrapped, so that they can be copied.
    """
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in headings:
        is_id = heading in ids
        table.add_column(heading, no_wrap=is_id, min_width=_ID_WIDTH if is_id else None, overflow="fold")
    return table


def sparkline(values: Sequence[float], *, low: float = 0.0, high: float = 1.0, width: int = 48) -> str:
    """Draw the last values as a line of bars. More values than `width` are averaged in equal runs."""
    if not values:
        return ""
    if len(values) > width:
        edges = [round(index * len(values) / width) for index in range(width + 1)]
        values = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    span = (high - low) or 1.0
    steps = len(_BARS) - 1
    return "".join(_BARS[round(min(max((value - low) / span, 0.0), 1.0) * steps)] for value in values)


@dataclass(frozen=True, kw_only=True)
class LiveRun:
    """Figures of a run for the live table. `reward` is the mean of the last 128 sessions, None before the first."""

    sessions: int
    open_sessions: int
    reward: float | None
    reward_history: Sequence[float]
    version: int
    swaps: int
    staleness_mean: float | None
    staleness_max: int | None
    tokens_per_second: float
    failed_calls: int
    turns: int
    seconds: float


def live_table(run: LiveRun, *, title: str, admin_url: str, admin_key: str, target: float) -> RenderableType:
    """Draw the demo's live table."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", justify="right", no_wrap=True)
    table.add_column()
    reward = Text("waiting for the first sessions", style="dim")
    if run.reward is not None:
        colour = "green" if run.reward >= target else "yellow" if run.reward >= target / 2 else "red"
        reward = Text.assemble(
            (f"{run.reward:.2f}", f"bold {colour}"),
            "  ",
            (sparkline(run.reward_history, width=_LIVE_BARS), colour),
            f"  → {target:.2f}",
        )
    staleness = "–" if run.staleness_mean is None else f"{run.staleness_mean:.1f} mean, {run.staleness_max} max"
    table.add_row("mean reward", reward)
    table.add_row("sessions", f"{run.sessions} done, {run.open_sessions} open")
    table.add_row("policy version", f"{run.version}  ({run.swaps} hot swaps, {run.failed_calls} failed calls)")
    table.add_row("staleness", f"{staleness} (versions)")
    table.add_row("engine", f"{run.tokens_per_second:,.0f} tokens/s, {run.turns} calls served")
    table.add_row("admin page", Text.assemble((admin_url, "bold cyan underline"), f"   key {admin_key}"))
    table.add_row("time", f"{run.seconds:.0f} s    Ctrl-C ends it cleanly")
    return Panel(table, title=title, title_align="left", border_style="cyan", padding=(1, 2))


def live_line(run: LiveRun) -> str:
    """Write the figures of `live_table` in one line, for logs."""
    reward = "–" if run.reward is None else f"{run.reward:.3f}"
    staleness = "–" if run.staleness_mean is None else f"{run.staleness_mean:.1f}"
    return (
        f"{run.seconds:6.1f} s  reward {reward}  sessions {run.sessions}  version {run.version}  "
        f"staleness {staleness}  {run.tokens_per_second:.0f} tokens/s  failed {run.failed_calls}"
    )


def health_table(health: dict[str, Any], runs: Sequence[dict[str, Any]] = ()) -> RenderableType:
    """Draw the health view of the operating API, and the reasons why `runs` (summaries) cannot have learnt yet."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    table.add_column()
    table.add_row("calls", Text("served", "green") if health["ready"] else Text("not served", "red"))
    table.add_row("database", _database_line(health))
    table.add_row("engine", Text("ready", "green") if health["engine_ready"] else Text("not ready", "red"))
    engines = health.get("engines", ())  # missing in the answer of an older base-rl
    for engine in engines if len(engines) > 1 else ():
        served = (f"{run}@{'–' if version is None else version}" for run, version in engine["versions"].items())
        table.add_row(engine["name"], f"{engine['state'].replace('_', ' ')}  {', '.join(served)}  {engine['url']}")
    if health["disk_free_bytes"] is not None:
        table.add_row("disk", f"{health['disk_free_bytes'] / 1024**3:.0f} GiB free")
    for run in health["runs"]:
        table.add_row(
            f"run {run['name']}",
            f"{run['state']}, serving version {run['serving_version']} of {run['head_version']}; "
            f"trainer {'not seen yet' if run['trainer'] == 'never' else run['trainer']}",
        )
    for summary in runs:
        for reason in summary["not_learnt_because"]:
            table.add_row(Text("not learnt yet", "yellow"), f"{summary['name']}: {reason}")
    for problem in health["problems"]:
        table.add_row(Text("problem", "red"), problem)
    return table


def _database_line(health: dict[str, Any]) -> str:
    line = f"{health['database']}, answers in {health['database_seconds'] * 1000:.1f} ms"
    integrity = {"checking": "being checked for damage", "unchecked": "not checked for damage: see the proxy's log"}
    note = integrity.get(health["database_integrity"])
    return line if note is None else f"{line}; {note}"


def transcript(title: str, record: dict[str, Any]) -> RenderableType:
    """Draw a session as a conversation. `record` has `messages` and `reward`."""
    lines: list[RenderableType] = []
    for message in record["messages"]:
        role = message["role"]
        text = message.get("content") or ""
        if role == "user":
            lines.append(Text.assemble(("user       ", "bold blue"), text))
        elif role == "tool":
            lines.append(Text.assemble(("tool       ", "bold yellow"), text))
        else:
            for call in message.get("tool_calls") or ():
                lines.append(Text.assemble(("assistant  ", "bold magenta"), _call(call["function"])))
            if text:
                lines.append(Text.assemble(("assistant  ", "bold magenta"), text))
    reward = record["reward"]
    lines.append(Text(f"reward     {reward:g}", style="bold green" if reward > 0 else "bold red"))
    return Panel(Group(*lines), title=title, title_align="left", border_style="dim")


def _call(function: dict[str, Any]) -> str:
    try:
        arguments = json.loads(function["arguments"])
        inside = ", ".join(f"{name}={json.dumps(value)}" for name, value in arguments.items())
    except (ValueError, AttributeError):
        inside = str(function["arguments"])
    return f"{function['name']}({inside})"
