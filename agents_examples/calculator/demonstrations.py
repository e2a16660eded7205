"""Demonstrations for the warm start: conversations of the agent with a model, good and mediocre ones."""

from __future__ import annotations

import json
import random
from enum import StrEnum
from typing import Any

from agents_examples.calculator.tasks import CALCULATOR, OPERATIONS, Problem, calculate, random_problem
from agents_examples.tiny.checkpoint import Conversation, Recipe, Stage
from agents_examples.tiny.habits import draw_habits

Message = dict[str, Any]


class Habit(StrEnum):
    """A demonstrator's behaviour. Only `RIGHT` earns the reward, apart from lucky guesses."""

    RIGHT = "right"
    GUESS = "guess"
    """Answers a random number without using the tool."""
    BROKEN_CALL = "broken_call"
    """Does not close the JSON of the call."""
    OTHER_OPERATION = "other_operation"
    IGNORED_RESULT = "ignored_result"


Mixture = dict[Habit, float]

ALL_RIGHT: Mixture = {Habit.RIGHT: 1.0}
MEDIOCRE: Mixture = {
    Habit.RIGHT: 0.20,
    Habit.GUESS: 0.58,
    Habit.BROKEN_CALL: 0.11,
    Habit.OTHER_OPERATION: 0.03,
    Habit.IGNORED_RESULT: 0.08,
}
"""Shares of the habits in the mediocre mixture. The guess is the most frequent habit, so that greedy decoding does
not find the right one before learning does. Wrong operations are rare: with many of them the warm start forgets how
to read the operation, and learning stalls."""


def demonstrate(rng: random.Random, mixture: Mixture, count: int) -> list[list[Message]]:
    """Return conversations about random problems, in which the number of every habit follows its share to within
    one."""
    return [conversation(random_problem(rng), habit, rng) for habit in draw_habits(rng, mixture, count)]


def conversation(problem: Problem, habit: Habit, rng: random.Random) -> list[Message]:
    """Return the messages from the question to the last answer, in the form in which the agent sends them."""
    question = {"role": "user", "content": problem.question}
    if habit is Habit.GUESS:
        return [question, _says(f"The answer is {rng.randrange(10 ** rng.randint(1, 4))}.")]
    arguments = {"a": problem.a, "b": problem.b, "op": problem.op}
    if habit is Habit.BROKEN_CALL:
        unclosed = json.dumps({"name": "calculator", "arguments": arguments})[:-2]
        return [question, _says(f"<tool_call>\n{unclosed}\n</tool_call>")]
    if habit is Habit.OTHER_OPERATION:
        arguments["op"] = rng.choice([op for op in OPERATIONS if op != problem.op])
    call = json.dumps(arguments)
    result = calculate(call)
    last = "I do not know." if habit is Habit.IGNORED_RESULT else f"The answer is {result}."
    return [question, _calls(call), {"role": "tool", "tool_call_id": "call_0", "content": result}, _says(last)]


def _says(text: str) -> Message:
    return {"role": "assistant", "content": text}


def _calls(arguments: str) -> Message:
    function = {"name": "calculator", "arguments": arguments}
    return {"role": "assistant", "tool_calls": [{"id": "call_0", "type": "function", "function": function}]}


def recipe(*, right_steps: int = 200, mediocre_steps: int = 100) -> Recipe:
    """Return the recipe of the calculator's checkpoint."""

    def stage(mixture: Mixture, steps: int) -> Stage:
        return Stage(
            steps=steps,
            demonstrate=lambda rng, count: [with_tool(messages) for messages in demonstrate(rng, mixture, count)],
        )

    return Recipe(stages=[stage(ALL_RIGHT, right_steps), stage(MEDIOCRE, mediocre_steps)])


def with_tool(messages: list[Message]) -> Conversation:
    """Return the messages with the description of the calculator."""
    return Conversation(messages=messages, tools=[dict(CALCULATOR)])
