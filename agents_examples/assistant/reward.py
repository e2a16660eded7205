"""What `base-rl attempts` posts: nothing of attempts that are trained, and a measure of evaluations."""

from __future__ import annotations

from typing import Any

from agents_examples.assistant.tasks import THANKS


def reward(task: dict[str, Any], comments: list[str]) -> None:
    """Post no reward. The session ends, and the judge of `config.toml` reads what the user said."""


def evaluate(task: dict[str, Any], comments: list[str]) -> float:
    """Return 1 if the user was satisfied at once, and said nothing but thanks.

    For `base-rl attempts --eval`, whose sessions are never trained.
    """
    return float(comments == [THANKS])
