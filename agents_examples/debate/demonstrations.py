"""Demonstrations for the warm start: sides that work their sum out, and sides that only insist."""

from __future__ import annotations

import random
from enum import StrEnum

from agents_examples.debate.agent import heard, instruction
from agents_examples.debate.tasks import LARGEST_TERM, Sum, random_motion
from agents_examples.tiny.checkpoint import Conversation, Recipe, stage_of_habits


class Habit(StrEnum):
    """How a side argues. Only `WORKED_OUT` is sound, apart from lucky exaggerations."""

    WORKED_OUT = "worked_out"
    INSIST = "insist"
    EXAGGERATE = "exaggerate"
    """Claims a number without working the sum out."""
    CONCEDE = "concede"


Mixture = dict[Habit, float]

ALL_RIGHT: Mixture = {Habit.WORKED_OUT: 1.0}
MEDIOCRE: Mixture = {Habit.WORKED_OUT: 0.2, Habit.INSIST: 0.4, Habit.EXAGGERATE: 0.2, Habit.CONCEDE: 0.2}


def statement(own: Sum, habit: Habit, rng: random.Random) -> str:
    if habit is Habit.WORKED_OUT:
        return f"{own.expression} = {own.result}"
    if habit is Habit.EXAGGERATE:
        return f"It is at least {rng.randint(2, 2 * LARGEST_TERM)}."
    return "Mine is larger, trust me." if habit is Habit.INSIST else "I cannot say."


def demonstration(habit: Habit, rng: random.Random) -> Conversation:
    """Return a statement of one of the two sides; what the replying side hears has any habit."""
    motion = random_motion(rng)
    if rng.random() < 0.5:
        own, asked = motion.opener, instruction(motion, motion.opener)
    else:
        own = motion.replier
        asked = heard(instruction(motion, own), statement(motion.opener, rng.choice(list(Habit)), rng))
    said = statement(own, habit, rng)
    return Conversation(messages=[{"role": "user", "content": asked}, {"role": "assistant", "content": said}])


def recipe(*, right_steps: int = 450, mediocre_steps: int = 150) -> Recipe:
    """Return the recipe of the checkpoint, which both sides begin with."""
    right, mediocre = (ALL_RIGHT, right_steps), (MEDIOCRE, mediocre_steps)
    return Recipe(stages=[stage_of_habits(mixture, steps, demonstration) for mixture, steps in (right, mediocre)])
