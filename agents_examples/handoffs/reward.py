"""The reward for `base-rl attempts`: 1 if the question was answered rightly, by whomever, else 0."""

from __future__ import annotations

from typing import Any

from agents_examples.handoffs.tasks import is_right


def reward(task: dict[str, Any], found: dict[str, Any]) -> float:
    """Return the reward of the triage agent. `agent.py` posts the specialist's."""
    return float(is_right(task, found["answer"]))
