"""The texts of a scripted person, who knows the problem and the reward, and writes no number."""

from __future__ import annotations

import random

from agents_examples.calculator.tasks import Problem

SHOULD = "You should have used the calculator for {}."
PRAISE = "Well done, you used the calculator for {}."
SILENT = "ok"

_SILENT_SHARE = 0.05


def text_about(problem: Problem, reward: float, rng: random.Random) -> str:
    """Return a text about an attempt at the problem; one in twenty says nothing."""
    if rng.random() < _SILENT_SHARE:
        return SILENT
    return (PRAISE if reward == 1 else SHOULD).format(problem.expression)
