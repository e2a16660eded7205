"""The reward for `base-rl attempts`: 1 if the opening side won the debate. `agent.py` posts the opponent's."""

from __future__ import annotations

from typing import Any

from agents_examples.debate.agent import Debate


def reward(task: dict[str, Any], held: Debate) -> dict[str, Any]:
    """Return the feedback on the opening side."""
    return held.feedback(0)
