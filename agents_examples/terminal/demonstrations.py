"""Demonstrations for the warm start: jobs done with commands, and jobs that are only said to be done."""

from __future__ import annotations

import json
import random
from enum import StrEnum
from typing import Any

from agents_examples.terminal.agent import INSTRUCTION
from agents_examples.terminal.tasks import Job, Kind, random_job
from agents_examples.terminal.tools import BASH_TOOL
from agents_examples.tiny.checkpoint import Conversation, Recipe, stage_of_habits

Message = dict[str, Any]

COMMANDS = {
    Kind.RENAME: "mv {file} {new}",
    Kind.COPY: "cp {file} {new}",
    Kind.DELETE: "rm {file}",
    Kind.SORT: "sort {file} > {new}",
    Kind.DELETE_FOUND: "rm {file}",
    Kind.RENAME_FOUND: "mv {file} {new}",
}
SEARCH = "grep -l {word} *"
DONE = "Done"
NOTHING_PRINTED = "no output"


class Habit(StrEnum):
    """How a demonstrator goes about a job. Only `DO` earns the reward."""

    DO = "do"
    CLAIM = "claim"
    """Says at once that it is done."""
    LOOK = "look"
    """Lists the files, and says that it is done."""
    ASK = "ask"
    STOP_HALF_WAY = "stop_half_way"
    """Searches for the file, and names it instead of going on; claims where nothing is to be searched."""


Mixture = dict[Habit, float]

ALL_RIGHT: Mixture = {Habit.DO: 1.0}
MEDIOCRE: Mixture = {
    Habit.DO: 0.12,
    Habit.CLAIM: 0.43,
    Habit.LOOK: 0.15,
    Habit.ASK: 0.15,
    Habit.STOP_HALF_WAY: 0.15,
}


def conversation(job: Job, habit: Habit) -> list[Message]:
    """Return the messages from the instruction to the last answer, in the form in which the agent sends them."""
    messages: list[Message] = [
        {"role": "system", "content": INSTRUCTION},
        {"role": "user", "content": job.instruction},
    ]
    last = DONE
    if habit is Habit.ASK:
        last = "Which file do you mean?"
    elif habit is Habit.LOOK:
        messages += _command("ls", "\n".join(sorted(job.files)))
    elif habit is Habit.STOP_HALF_WAY and job.kind.searched:
        messages += _command(SEARCH.format(word=job.word), job.file)
        last = f"It is {job.file}"
    elif habit is Habit.DO:
        if job.kind.searched:
            messages += _command(SEARCH.format(word=job.word), job.file)
        messages += _command(COMMANDS[job.kind].format(file=job.file, new=job.new), NOTHING_PRINTED)
    return [*messages, {"role": "assistant", "content": last}]


def _command(command: str, printed: str) -> list[Message]:
    """Return a call of the tool and its result."""
    function = {"name": "bash", "arguments": json.dumps({"command": command})}
    call = {"id": "call_0", "type": "function", "function": function}
    return [
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_0", "content": printed},
    ]


def demonstration(habit: Habit, rng: random.Random) -> Conversation:
    """Return a conversation about a random job."""
    return Conversation(messages=conversation(random_job(rng), habit), tools=[dict(BASH_TOOL)])


def recipe(*, right_steps: int = 180, mediocre_steps: int = 150) -> Recipe:
    """Return the recipe of the checkpoint."""
    right, mediocre = (ALL_RIGHT, right_steps), (MEDIOCRE, mediocre_steps)
    return Recipe(stages=[stage_of_habits(mixture, steps, demonstration) for mixture, steps in (right, mediocre)])
