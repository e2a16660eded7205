"""The rewards for `base-rl attempts`: one of the session, and one of each wrong answer."""

from __future__ import annotations

from typing import Any

from agents_examples.retry.agent import Try

WRONG_ANSWER = -0.5
"""The reward of a wrong answer's turn. With it, being right at once earns more than being right after a retry."""


def reward(task: dict[str, Any], tries: list[Try]) -> list[dict[str, Any]]:
    """Return the feedback on an attempt: the session earns 1 if its last answer is right, else 0."""
    of_turns = [{"turn_id": one.id, "reward": WRONG_ANSWER} for one in tries if not one.right]
    return [*of_turns, {"reward": float(tries[-1].right)}]
