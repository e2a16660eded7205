"""Demonstrations for the warm start: questions that are answered by searching, and questions that are not. Each has a
world of its own, so that what the model learns is to search and to copy."""

from __future__ import annotations

import json
import random
from enum import StrEnum
from typing import Any

from agents_examples.search.tasks import CITIES, NAMES, WORKERS, Kind, Question, question, random_world
from agents_examples.search.tools import INSTRUCTIONS
from agents_examples.tiny.checkpoint import Conversation, Recipe, stage_of_habits

Message = dict[str, Any]

_FUNCTION = {
    "name": "search",
    "description": "Search the documents.",
    "parameters": {"properties": {"query": {"type": "string"}}, "required": ["query"], "type": "object"},
}
TOOLS: tuple[dict[str, Any], ...] = ({"type": "function", "function": _FUNCTION},)
"""The tool as LangChain describes it to the model."""


class Habit(StrEnum):
    """How a demonstrator goes about a question. Only `SEARCH` is right, apart from lucky guesses."""

    SEARCH = "search"
    STOP_EARLY = "stop_early"
    """Answers with what the first search finds."""
    GUESS = "guess"
    DECLINE = "decline"


Mixture = dict[Habit, float]

ALL_RIGHT: Mixture = {Habit.SEARCH: 1.0}
MEDIOCRE: Mixture = {Habit.SEARCH: 0.22, Habit.STOP_EARLY: 0.18, Habit.GUESS: 0.35, Habit.DECLINE: 0.25}


def conversation(asked: Question, habit: Habit, rng: random.Random) -> list[Message]:
    """Return the messages between user and agent, in the form in which the agent sends them."""
    messages: list[Message] = [
        {"role": "system", "content": INSTRUCTIONS},
        {"role": "user", "content": asked.text},
    ]
    searches = {Habit.SEARCH: asked.searches, Habit.STOP_EARLY: asked.searches[:1]}.get(habit, ())
    for one in searches:
        function = {"name": "search", "arguments": json.dumps({"query": one.words})}
        call = {"id": f"call_{len(messages)}", "type": "function", "function": function}
        messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": one.document})
    if searches:
        said = f"{searches[-1].found}."
    else:
        said = f"I think {rng.choice(CITIES)}." if habit is Habit.GUESS else "I do not know."
    messages.append({"role": "assistant", "content": said})
    return messages


def demonstration(habit: Habit, rng: random.Random) -> Conversation:
    """Return a conversation about a random question of a random world."""
    kinds = [kind for kind in Kind if habit is not Habit.STOP_EARLY or kind is not Kind.HOME]
    asked = question(random_world(rng), rng.choice(kinds), rng.choice(WORKERS))
    return Conversation(messages=conversation(asked, habit, rng), tools=TOOLS)


def recipe(*, right_steps: int = 700, mediocre_steps: int = 150) -> Recipe:
    """Return the recipe of the checkpoint."""
    right, mediocre = (ALL_RIGHT, right_steps), (MEDIOCRE, mediocre_steps)
    return Recipe(
        stages=[stage_of_habits(mixture, steps, demonstration) for mixture, steps in (right, mediocre)],
        words=NAMES,
    )
