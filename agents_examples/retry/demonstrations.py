"""Demonstrations for the warm start: sums worked out, and sums guessed, twice if need be."""

from __future__ import annotations

import random
from enum import StrEnum
from typing import Any

from agents_examples.retry.agent import TRIES, feedback, last_number
from agents_examples.retry.tasks import LARGEST_TERM, Sum, random_sum
from agents_examples.tiny.checkpoint import Conversation, Recipe, Stage, stage_of_habits
from agents_examples.tiny.habits import draw_habits

Message = dict[str, Any]


class Habit(StrEnum):
    """How one answer comes about. Only `WORKED_OUT` is right, apart from lucky guesses."""

    WORKED_OUT = "worked_out"
    """Writes the whole sum."""
    GUESS = "guess"
    GIVE_UP = "give_up"


Mixture = dict[Habit, float]

ALL_RIGHT: Mixture = {Habit.WORKED_OUT: 1.0}
MEDIOCRE: Mixture = {Habit.WORKED_OUT: 0.1, Habit.GUESS: 0.62, Habit.GIVE_UP: 0.28}
AFTER_A_GUESS = 0.4
"""The share of right demonstrations that begin with a guess, which the model reads and is not taught: it must know
how to work a sum out after a wrong answer too."""


def answer(one: Sum, habit: Habit, rng: random.Random) -> str:
    if habit is Habit.WORKED_OUT:
        return f"{one.expression} = {one.result}"
    if habit is Habit.GUESS:
        return f"I guess {rng.randint(2, 2 * LARGEST_TERM)}"
    return "I do not know"


def right(rng: random.Random) -> Conversation:
    """Return a sum that is worked out, at once or after a guess of somebody else."""
    one = random_sum(rng)
    messages = _asked(one)
    if rng.random() < AFTER_A_GUESS:
        _say(messages, one, answer(one, rng.choice((Habit.GUESS, Habit.GIVE_UP)), rng))
    if messages[-1]["role"] == "user":
        messages.append({"role": "assistant", "content": answer(one, Habit.WORKED_OUT, rng)})
    return Conversation(messages=messages, taught=frozenset({len(messages) - 1}))


def mediocre(first: Habit, rng: random.Random) -> Conversation:
    """Return a whole attempt whose first answer has this habit; the habits of later ones are drawn."""
    one = random_sum(rng)
    messages = _asked(one)
    for number in range(TRIES):
        habit = first if number == 0 else draw_habits(rng, MEDIOCRE, 1)[0]
        _say(messages, one, answer(one, habit, rng))
        if messages[-1]["role"] == "assistant":
            return Conversation(messages=messages)
    return Conversation(messages=messages[:-1])


def _asked(one: Sum) -> list[Message]:
    return [{"role": "user", "content": one.question}]


def _say(messages: list[Message], one: Sum, text: str) -> None:
    """Append an answer, and what the agent says of it if it is wrong."""
    messages.append({"role": "assistant", "content": text})
    found = last_number(text)
    if found != one.result:
        messages.append({"role": "user", "content": feedback(found, one.result)})


def recipe(*, right_steps: int = 400, mediocre_steps: int = 150) -> Recipe:
    """Return the recipe of the checkpoint."""
    return Recipe(
        stages=[
            Stage(steps=right_steps, demonstrate=lambda rng, count: [right(rng) for _ in range(count)]),
            stage_of_habits(MEDIOCRE, mediocre_steps, mediocre),
        ]
    )
