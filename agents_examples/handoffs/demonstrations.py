"""Demonstrations for the warm start: all three agents, doing their work and not, by one model that is told in its
instructions which agent it is."""

from __future__ import annotations

import json
import random
from enum import StrEnum
from typing import Any

from agents_examples.handoffs.tasks import INSTRUCTIONS, LARGEST, SPECIALISTS, TRIAGE, Question, random_question
from agents_examples.tiny.checkpoint import Conversation, Recipe, stage_of_habits

Message = dict[str, Any]

NOT_MINE = "That is not my question."


class Habit(StrEnum):
    """How an agent goes about a question. The first three are the triage agent's, the others a specialist's."""

    HAND_OVER = "hand_over"
    HAND_ASTRAY = "hand_astray"
    """To the other specialist."""
    ANSWER_ITSELF = "answer_itself"
    SOLVE = "solve"
    GUESS = "guess"
    DECLINE = "decline"
    REFER = "refer"
    """Says of a question for the other specialist that it is not its own."""


Mixture = dict[Habit, float]

ALL_RIGHT: Mixture = {Habit.HAND_OVER: 0.35, Habit.SOLVE: 0.55, Habit.REFER: 0.1}
MEDIOCRE: Mixture = {
    Habit.HAND_OVER: 0.3,
    Habit.HAND_ASTRAY: 0.06,
    Habit.ANSWER_ITSELF: 0.1,
    Habit.SOLVE: 0.08,
    Habit.GUESS: 0.24,
    Habit.DECLINE: 0.15,
    Habit.REFER: 0.07,
}


def _tool(specialist: str, description: str) -> dict[str, Any]:
    """Return a handoff as the SDK describes it to the model."""
    parameters = {"additionalProperties": False, "type": "object", "properties": {}, "required": []}
    function = {
        "name": f"transfer_to_{specialist}",
        "description": f"Handoff to the {specialist} agent to handle the request. {description}",
        "parameters": parameters,
        "strict": True,
    }
    return {"type": "function", "function": function}


TOOLS = tuple(_tool(name, description) for name, description in SPECIALISTS.items())


def other(specialist: str) -> str:
    (name,) = SPECIALISTS.keys() - {specialist}
    return name


def handoff(specialist: str) -> Message:
    """Return the triage agent's call of a handoff."""
    call = {"id": "call_1", "type": "function", "function": {"name": f"transfer_to_{specialist}", "arguments": "{}"}}
    return {"role": "assistant", "tool_calls": [call]}


def prompt_of_triage(question: Question) -> list[Message]:
    return [{"role": "system", "content": INSTRUCTIONS[TRIAGE]}, {"role": "user", "content": question.text}]


def prompt_of_specialist(specialist: str, question: Question) -> list[Message]:
    """Return what a specialist reads to which a question was handed: its own instructions, and the triage agent's
    call."""
    return [
        {"role": "system", "content": INSTRUCTIONS[specialist]},
        {"role": "user", "content": question.text},
        handoff(specialist),
        {"role": "tool", "tool_call_id": "call_1", "content": json.dumps({"assistant": specialist})},
    ]


def demonstration(habit: Habit, rng: random.Random) -> Conversation:
    """Return a question, and how one of the agents goes about it."""
    question = random_question(rng)
    if habit in {Habit.HAND_OVER, Habit.HAND_ASTRAY}:
        chosen = question.agent if habit is Habit.HAND_OVER else other(question.agent)
        return Conversation(messages=[*prompt_of_triage(question), handoff(chosen)], tools=TOOLS)
    said = {"role": "assistant", "content": _said(habit, question, rng)}
    if habit is Habit.ANSWER_ITSELF:
        return Conversation(messages=[*prompt_of_triage(question), said], tools=TOOLS)
    specialist = other(question.agent) if habit is Habit.REFER else question.agent
    prompt = prompt_of_specialist(specialist, question)
    return Conversation(messages=[*prompt, said], taught=frozenset({len(prompt)}))


def _said(habit: Habit, question: Question, rng: random.Random) -> str:
    if habit is Habit.SOLVE:
        return question.working
    if habit in {Habit.GUESS, Habit.ANSWER_ITSELF}:
        return f"I guess {rng.randint(2, 2 * LARGEST)}."
    return NOT_MINE if habit is Habit.REFER else "I cannot say."


def recipe(*, right_steps: int = 450, mediocre_steps: int = 150) -> Recipe:
    """Return the recipe of the checkpoint, which all three agents begin with."""
    right, mediocre = (ALL_RIGHT, right_steps), (MEDIOCRE, mediocre_steps)
    return Recipe(stages=[stage_of_habits(mixture, steps, demonstration) for mixture, steps in (right, mediocre)])
