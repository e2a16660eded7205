"""The reward for `base-rl attempts`: 1 if the last answer solves the puzzle, else 0."""

from __future__ import annotations

from typing import Any

from agents_examples.countdown.tasks import value_of


def reward(task: dict[str, Any], answer: str) -> float:
    """Return the reward of an attempt at a task of `tasks.jsonl`. An answer is the expression and nothing else."""
    return float(value_of(answer, tuple(task["numbers"])) == task["target"])
