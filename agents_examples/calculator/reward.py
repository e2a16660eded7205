"""The reward for `base-rl attempts`: 1 if the last answer is right, else 0."""

from __future__ import annotations

from typing import Any

from agents_examples.calculator.agent import Answer
from agents_examples.calculator.tasks import Problem, score


def reward(task: dict[str, Any], answer: Answer) -> float:
    """Return the reward of an attempt at a task of `tasks.jsonl`."""
    return score(Problem(a=task["a"], op=task["op"], b=task["b"]), answer.text)
