"""The reward for `base-rl attempts`: 1 if the database ends as the policy wants it, else 0."""

from __future__ import annotations

from typing import Any


def reward(task: dict[str, Any], state: dict[str, Any]) -> float:
    """Return the reward of an attempt at a task of `tasks.jsonl`. What the agent said to the customer does not
    count."""
    return float(state == task["wanted"])
