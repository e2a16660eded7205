"""Draw the comparison of two versions for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

_ABSENT = "–"

_FIGURES = (
    ("sessions", "sessions", "{:d}"),
    ("mean reward", "reward_mean", "{:.3f}"),
    ("failed sessions", "failed_share", "{:.1%}"),
    ("calls per session", "calls_per_session", "{:.1f}"),
    ("answers cut at the bound", "cut_share", "{:.1%}"),
    ("seconds per call", "call_seconds", "{:.2f}"),
)


def draw_diff(diff: dict[str, Any]) -> Iterator[RenderableType]:
    """Draw the answer of `GET …/versions/diff`."""
    before, after, steps = diff["before"], diff["after"], diff["steps"]
    names = (f"v{before['version']}", f"v{after['version']}")
    yield Text(
        f"{diff['run']}, {names[0]} to {names[1]}: {len(steps)} steps trained {diff['trained_sessions']} sessions"
    )
    if not before["sessions"] or not after["sessions"]:
        missing = " and ".join(
            name for name, figures in zip(names, (before, after), strict=True) if not figures["sessions"]
        )
        yield Text(f"no session was answered by {missing} alone, so their figures and tasks cannot be compared")
    else:
        figures = _table("", *names)
        for label, field, form in _FIGURES:
            figures.add_row(label, _figure(before[field], form), _figure(after[field], form))
        yield figures
    for heading, tasks in (("better", diff["better"]), ("worse", diff["worse"])):
        if tasks:
            yield _tasks(heading, names, tasks)
    if diff["movers"]:
        yield _movers(diff["movers"])
        yield Text(
            "a positive pull made a session's answers likelier; `base-rl sessions show ID` shows one", style="dim"
        )


def _tasks(heading: str, names: tuple[str, str], tasks: Sequence[dict[str, Any]]) -> Table:
    table = _table(f"tasks that got {heading}", f"reward {names[0]}", f"reward {names[1]}", "sessions")
    for task in tasks:
        table.add_row(
            Text(" ".join(task["task"].split())),
            f"{task['before']:.3f}",
            f"{task['after']:.3f}",
            f"{task['sessions_before']} → {task['sessions_after']}",
        )
    return table


def _movers(movers: Sequence[dict[str, Any]]) -> Table:
    table = _table("sessions that moved it most", "step", "reward", "advantage", "tokens", "pull", "share", "task")
    for mover in movers:
        reward = mover["reward"]
        table.add_row(
            mover["session_id"],
            f"v{mover['version']}",
            _ABSENT if reward is None else f"{reward:.3g}",
            f"{mover['advantage']:+.3f}",
            str(mover["trained_tokens"]),
            f"{mover['pull']:+.1f}",
            f"{mover['share']:.1%}",
            Text(" ".join((mover["task"] or "").split())),
        )
    return table


def _figure(value: float | None, form: str) -> str:
    return _ABSENT if value is None else form.format(value)


def _table(*headings: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in headings:
        table.add_column(heading, no_wrap=True)
    return table
