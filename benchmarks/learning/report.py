"""The figures as a table, compared with the targets."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.learning.tasks import TASKS
from benchmarks.targets import Target
from trainer.algorithm.presets import PRESETS

LEAST = 0.85
_JUDGED = ("staleness_0", "staleness_2")


_FIRST = next(iter(TASKS))


def figures_in(at: dict[str, Any], task: str) -> list[dict[str, Any]]:
    """Return the dictionaries for a task's figures within those of a preset and a staleness: the one under the task's
    name, and for the first task also the outer one."""
    found: dict[str, Any] = at.setdefault(task, {})
    return [found, at] if task == _FIRST else [found]


def by_preset(result: dict[str, Any], task: str) -> dict[str, dict[str, dict[str, Any]]]:
    """Return the figures of a task by preset and staleness. Presets and stalenesses without figures are omitted."""
    found = {
        preset: {staleness: figures for staleness, at in of_preset.items() if (figures := _figures(at, task))}
        for preset, of_preset in result.items()
        if preset in PRESETS
    }
    return {preset: figures for preset, figures in found.items() if figures}


def _figures(at: dict[str, Any], task: str) -> dict[str, Any] | None:
    """Return the task's figures. Results with a single task have them without its name."""
    found: dict[str, Any] | None = at.get(task, at if task == _FIRST and "final" in at else None)
    return found


def judged(result: dict[str, Any]) -> list[Target]:
    """Return the worst seed of every preset, for the stalenesses that have a target."""
    return [
        Target(what=f"{task}, {preset}, {staleness}", measured=min(found["final"]), bound=LEAST, at_least=True)
        for task in TASKS
        for preset, by_staleness in by_preset(result, task).items()
        for staleness, found in by_staleness.items()
        if staleness in _JUDGED
    ]


def page_rows(result: dict[str, Any], task: str) -> list[list[str]]:
    """Return a row for each preset: for each staleness, the steps to 0.9 of all seeds and the median final reward."""
    return [
        [f"`{preset}`", *(cell for found in by_staleness.values() for cell in _cells(found))]
        for preset, by_staleness in by_preset(result, task).items()
    ]


def _cells(found: dict[str, Any]) -> tuple[str, str]:
    steps = ", ".join("–" if count is None else str(count) for count in found["steps_to_090"])
    return steps, f"{statistics.median(found['final']):.2f}"


def page(result: dict[str, Any]) -> str:
    """Return the tables of `docs/performance.md`, one for each task that was measured."""
    tables = []
    for task in TASKS:
        rows = page_rows(result, task)
        if rows:
            ages = [name.removeprefix("staleness_") for name in next(iter(by_preset(result, task).values()))]
            head = ["preset", *(cell for age in ages for cell in (f"staleness {age}: steps to 0.9", "final"))]
            lines = [head, ["---"] * len(head), *rows]
            tables.append(f"{task}:\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines))
    worst = min((target.measured for target in judged(result)), default=0.0)
    return "\n\n".join([*tables, f"The lowest final reward at staleness 0 and 2 is {worst:.2f}"])


def shown(result: dict[str, Any]) -> str:
    lines = []
    for task in TASKS:
        for preset, by_staleness in by_preset(result, task).items():
            cells = [(name, *_cells(found)) for name, found in by_staleness.items()]
            told = "   ".join(f"{name}: 0.9 after {steps}, then {final}" for name, steps, final in cells)
            lines.append(f"{task:<11}{preset:<13}{told}")
    for target in judged(result):
        if not target.reached:
            lines.append(f"NOT REACHED  {target.what}: {target.measured:.2f}, and {target.bound} is wanted")
    return "\n".join(lines)
