"""The figures as a table, judged against the targets."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.learning.tasks import TASKS
from benchmarks.targets import Target
from trainer.algorithm.presets import PRESETS

LEAST = 0.85
_JUDGED = ("staleness_0", "staleness_2")


def figures_in(at: dict[str, Any], task: str) -> dict[str, Any]:
    """The figures of a task among those of a preset and a staleness: the first task's are these themselves."""
    if task == next(iter(TASKS)):
        return at
    found: dict[str, Any] = at.setdefault(task, {})
    return found


def by_preset(result: dict[str, Any], task: str) -> dict[str, dict[str, dict[str, Any]]]:
    """The figures of a task: preset, staleness, figures; of the presets that have some."""
    presets = {name: found for name, found in result.items() if name in PRESETS}
    return {
        preset: {staleness: figures_in(at, task) for staleness, at in found.items()}
        for preset, found in presets.items()
        if all(figures_in(dict(at), task).get("final") for at in found.values())
    }


def judged(result: dict[str, Any]) -> list[Target]:
    """The worst seed of every preset, where little of what it learns from is stale."""
    return [
        Target(what=f"{task}, {preset}, {staleness}", measured=min(found["final"]), bound=LEAST, at_least=True)
        for task in TASKS
        for preset, by_staleness in by_preset(result, task).items()
        for staleness, found in by_staleness.items()
        if staleness in _JUDGED
    ]


def page_rows(result: dict[str, Any], task: str) -> list[list[str]]:
    """One row a preset: for each staleness the steps to 0.9 of all seeds, and the median of the final reward."""
    return [
        [f"`{preset}`", *(cell for found in by_staleness.values() for cell in _cells(found))]
        for preset, by_staleness in by_preset(result, task).items()
    ]


def _cells(found: dict[str, Any]) -> tuple[str, str]:
    steps = ", ".join("–" if count is None else str(count) for count in found["steps_to_090"])
    return steps, f"{statistics.median(found['final']):.2f}"


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
