"""The model that the runs begin with: the demo's, warmed up to understand feedback in words.

The demo's own checkpoint has never seen a message that says what an answer should have been, so that its prediction
would not change with one. Half of the demonstrations of this one have a message of the teacher's prompt before the
first answer, which the demonstrated conversation follows, and "ok" before conversations of the mediocre mixture.
"""

from __future__ import annotations

import random
from pathlib import Path

from agents_examples.calculator.demonstrations import (
    ALL_RIGHT,
    MEDIOCRE,
    Habit,
    Message,
    Mixture,
    conversation,
    demonstrate,
    with_tool,
)
from agents_examples.calculator.tasks import random_problem
from agents_examples.tiny.checkpoint import Conversation, Recipe, Stage, make_checkpoint
from benchmarks.feedback.texts import PRAISE, SHOULD, SILENT
from proxy.settings import TextSettings

RIGHT_STEPS, MEDIOCRE_STEPS = 250, 120
# Shares of the demonstrations with a message that say nothing, that are about the question's own problem among the
# rest, and that say what should have been done instead of praising.
_SILENT, _OWN_PROBLEM, _SHOULD = 0.12, 0.5, 0.7


def make_base(directory: Path, *, seed: int, short: bool) -> None:
    """Make tokenizer and weights in `directory`. Takes two to three minutes of a core, or seconds if `short`."""
    right, mediocre = (6, 2) if short else (RIGHT_STEPS, MEDIOCRE_STEPS)
    stages = [_stage(ALL_RIGHT, right), _stage(MEDIOCRE, mediocre)]
    make_checkpoint(Recipe(stages=stages, batch=64, tokenizer_conversations=1500), directory, seed=seed)


def _stage(mixture: Mixture, steps: int) -> Stage:
    return Stage(steps=steps, demonstrate=lambda rng, count: _demonstrations(rng, mixture, count))


def _demonstrations(rng: random.Random, mixture: Mixture, count: int) -> list[Conversation]:
    """Return demonstrations, every second one with a message of feedback."""
    conversations = demonstrate(rng, mixture, count // 2) + [_after_feedback(rng) for _ in range(count - count // 2)]
    return [with_tool(messages) for messages in conversations]


def _after_feedback(rng: random.Random) -> list[Message]:
    if rng.random() < _SILENT:
        question, *answers = demonstrate(rng, MEDIOCRE, 1)[0]
        return [question, _feedback(SILENT), *answers]
    problem = random_problem(rng)
    named = problem if rng.random() < _OWN_PROBLEM else random_problem(rng)
    text = (SHOULD if rng.random() < _SHOULD else PRAISE).format(named.expression)
    # The answer follows the text, even where that names another problem: the model learns to read it.
    _, *answers = conversation(named, Habit.RIGHT, rng)
    return [{"role": "user", "content": problem.question}, _feedback(text), *answers]


def _feedback(text: str) -> Message:
    settings = TextSettings()
    return {"role": settings.role, "content": settings.content([text])}
