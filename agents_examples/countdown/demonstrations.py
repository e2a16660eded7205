"""Demonstrations for the warm start: puzzles solved by a program that tries everything, and puzzles guessed."""

from __future__ import annotations

import json
import random
from enum import StrEnum
from typing import Any

from agents_examples.countdown.tasks import Puzzle, expressions, random_puzzle, value_of
from agents_examples.countdown.tools import PYTHON_TOOL
from agents_examples.tiny.checkpoint import Conversation, Recipe, stage_of_habits

Message = dict[str, Any]

SEARCH = """from itertools import permutations, product
for a, b, c in permutations([{numbers}]):
 for p, q in product('+-*', repeat=2):
  for e in f'{{a}}{{p}}{{b}}{{q}}{{c}}', f'({{a}}{{p}}{{b}}){{q}}{{c}}':
   if eval(e) == {target}:
    print(e)
    raise SystemExit"""
"""A program that prints the first expression of the numbers whose value is the target."""


class Habit(StrEnum):
    """How a demonstrator goes about a puzzle. Only `SEARCH` earns the reward, apart from lucky guesses."""

    SEARCH = "search"
    GUESS = "guess"
    """Answers an expression without a program."""
    BROKEN_PROGRAM = "broken_program"
    """Leaves out the program's end, so that it prints nothing that could be an answer."""
    ENDLESS_PROGRAM = "endless_program"
    IGNORED_RESULT = "ignored_result"


Mixture = dict[Habit, float]

ALL_RIGHT: Mixture = {Habit.SEARCH: 1.0}
MEDIOCRE: Mixture = {
    Habit.SEARCH: 0.2,
    Habit.GUESS: 0.58,
    Habit.BROKEN_PROGRAM: 0.1,
    Habit.ENDLESS_PROGRAM: 0.02,
    Habit.IGNORED_RESULT: 0.1,
}

UNKNOWN = "I do not know"
_STOPPED = "error: the program failed or exceeded a limit"
_UNFINISHED = "error: IndentationError: expected an indented block after 'for' statement on line 4 (program, line 4)"


def conversation(puzzle: Puzzle, habit: Habit, rng: random.Random) -> list[Message]:
    """Return the messages from the puzzle to the last answer, in the form in which the agent sends them."""
    question = {"role": "user", "content": puzzle.question}
    if habit is Habit.GUESS:
        return [question, _says(rng.choice(expressions(puzzle.numbers)))]
    code = SEARCH.format(numbers=", ".join(map(str, puzzle.numbers)), target=puzzle.target)
    found = next(one for one in expressions(puzzle.numbers) if value_of(one, puzzle.numbers) == puzzle.target)
    last = UNKNOWN if habit is Habit.IGNORED_RESULT else found
    if habit is Habit.BROKEN_PROGRAM:
        code, found, last = code.rpartition("\n   if")[0], _UNFINISHED, UNKNOWN
    elif habit is Habit.ENDLESS_PROGRAM:
        code, found, last = "while True: pass", _STOPPED, UNKNOWN
    return [question, _calls(code), {"role": "tool", "tool_call_id": "call_0", "content": found}, _says(last)]


def _says(text: str) -> Message:
    return {"role": "assistant", "content": text}


def _calls(code: str) -> Message:
    function = {"name": "python", "arguments": json.dumps({"code": code})}
    return {"role": "assistant", "tool_calls": [{"id": "call_0", "type": "function", "function": function}]}


def demonstration(habit: Habit, rng: random.Random) -> Conversation:
    """Return a conversation about a random puzzle."""
    return Conversation(messages=conversation(random_puzzle(rng), habit, rng), tools=[dict(PYTHON_TOOL)])


def recipe(*, right_steps: int = 250, mediocre_steps: int = 80) -> Recipe:
    """Return the recipe of the checkpoint."""
    right, mediocre = (ALL_RIGHT, right_steps), (MEDIOCRE, mediocre_steps)
    return Recipe(stages=[stage_of_habits(mixture, steps, demonstration) for mixture, steps in (right, mediocre)])
