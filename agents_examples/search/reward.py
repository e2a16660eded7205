"""The reward for `base-rl attempts`: 1 for the right name, else 0."""

from __future__ import annotations

from typing import Any

from agents_examples.search.tasks import is_right


def reward(task: dict[str, Any], answer: str) -> float:
    """Return the reward of an answer to a task of `tasks.jsonl`. How it was found does not count."""
    return float(is_right(answer, task["answer"]))
