"""Demonstrations for the warm start: reminders that are noted, and users who are put off."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any

from agents_examples.assistant.agent import NOTED, REMIND, TRIES
from agents_examples.assistant.tasks import LATEST_HOUR, NEVER_MIND, THANKS, Errand, Reminder, random_errand
from agents_examples.tiny.checkpoint import Conversation, Recipe, Stage, stage_of_habits
from agents_examples.tiny.habits import draw_habits

Message = dict[str, Any]

TOOL = {
    "type": "function",
    "function": {
        "name": REMIND["name"],
        "description": REMIND["description"],
        "parameters": dict(REMIND["input_schema"]),
    },
}
"""The tool as base-rl gives it to the chat template."""


class Habit(StrEnum):
    """How the assistant takes a request. Only `NOTE` satisfies the user."""

    NOTE = "note"
    PRETEND = "pretend"
    """Says that it is done, without the tool."""
    ASK_BACK = "ask_back"
    REFUSE = "refuse"
    OTHER_HOUR = "other_hour"


Mixture = dict[Habit, float]

MEDIOCRE: Mixture = {
    Habit.NOTE: 0.13,
    Habit.PRETEND: 0.45,
    Habit.ASK_BACK: 0.24,
    Habit.REFUSE: 0.15,
    Habit.OTHER_HOUR: 0.03,
}
AFTER_A_COMPLAINT = 0.4
"""The share of right demonstrations that begin with a bad answer, which the model reads and is not taught."""

DONE = "Done."
_SAID: Mapping[Habit, str] = {
    Habit.PRETEND: DONE,
    Habit.ASK_BACK: "When do you want to do that?",
    Habit.REFUSE: "I cannot do that.",
}
WELCOME, SORRY = "You are welcome.", "I am sorry."


def right(rng: random.Random) -> Conversation:
    """Return an errand that is noted, at once or after a bad answer of somebody else."""
    errand = random_errand(rng)
    habits = [Habit.NOTE]
    if rng.random() < AFTER_A_COMPLAINT:
        habits.insert(0, rng.choice([habit for habit in Habit if habit is not Habit.NOTE]))
    messages = conversation(errand, habits, rng)
    asked = [index for index, message in enumerate(messages) if message["role"] == "user"]
    taught = range(asked[len(habits) - 1], len(messages))
    return Conversation(
        messages=messages,
        tools=[TOOL],
        taught=frozenset(index for index in taught if messages[index]["role"] == "assistant"),
    )


def mediocre(first: Habit, rng: random.Random) -> Conversation:
    """Return a whole conversation whose first answer has this habit; those of later ones are drawn."""
    habits = [first, *(draw_habits(rng, MEDIOCRE, 1)[0] for _ in range(TRIES - 1))]
    return Conversation(messages=conversation(random_errand(rng), habits, rng), tools=[TOOL])


def conversation(errand: Errand, habits: Sequence[Habit], rng: random.Random) -> list[Message]:
    """Return the messages until the user has taken leave, in the form of the chat completions API."""
    messages: list[Message] = []
    reminders: list[Reminder] = []
    said = errand.request
    for habit in habits:
        messages += [{"role": "user", "content": said}, *_answer(errand, habit, reminders, rng)]
        comment = errand.comment(reminders)
        if comment == THANKS:
            return [*messages, {"role": "user", "content": comment}, {"role": "assistant", "content": WELCOME}]
        said = f"{comment} {errand.request}"
    leave = {"role": "user", "content": f"{comment} {NEVER_MIND}"}
    return [*messages, leave, {"role": "assistant", "content": SORRY}]


def _answer(errand: Errand, habit: Habit, reminders: list[Reminder], rng: random.Random) -> list[Message]:
    """Return the messages of one answer, and append the reminder that it notes."""
    if habit in _SAID:
        return [{"role": "assistant", "content": _SAID[habit]}]
    at = errand.wanted.at
    if habit is Habit.OTHER_HOUR:
        at = rng.choice([hour for hour in range(1, LATEST_HOUR + 1) if hour != at])
    reminders.append(Reminder(at=at, what=errand.wanted.what))
    function = {"name": REMIND["name"], "arguments": json.dumps(dataclasses.asdict(reminders[-1]))}
    return [
        {"role": "assistant", "tool_calls": [{"id": "call_0", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "call_0", "content": NOTED},
        {"role": "assistant", "content": DONE},
    ]


def recipe(*, right_steps: int = 300, mediocre_steps: int = 130) -> Recipe:
    """Return the recipe of the checkpoint."""
    return Recipe(
        stages=[
            Stage(steps=right_steps, demonstrate=lambda rng, count: [right(rng) for _ in range(count)]),
            stage_of_habits(MEDIOCRE, mediocre_steps, mediocre),
        ]
    )
