"""Questions, and the agents for them. `python -m agents_examples.handoffs.tasks` writes `tasks.jsonl`."""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TRIAGE, SUMS, UNITS = "triage", "sums", "units"
SPECIALISTS = {SUMS: "Adds numbers.", UNITS: "Converts units."}
"""What the triage agent is told about each specialist."""
INSTRUCTIONS = {
    TRIAGE: "Hand each question to the agent for it.",
    SUMS: "Add numbers. End with = and the sum.",
    UNITS: "Convert units. End with = and the result.",
}
LARGEST = 9
"""Of the numbers in questions."""
CONVERSIONS = (
    ("metres", "centimetres", 100),
    ("kilometres", "metres", 1000),
    ("kilograms", "grams", 1000),
    ("minutes", "seconds", 60),
    ("hours", "minutes", 60),
    ("days", "hours", 24),
    ("weeks", "days", 7),
    ("years", "months", 12),
)
_ANSWER = re.compile(r"[^=]*= (\d{1,6})( [a-z]+)?\.?")


@dataclass(frozen=True, kw_only=True)
class Question:
    """A question for the specialist `agent`. `working` is the answer as it should be given, `result` its number."""

    text: str
    agent: str
    working: str
    result: int


def answered(text: str) -> int | None:
    """Return the number with which an answer ends, after its only `=`. None if it has another form."""
    found = _ANSWER.fullmatch(text.strip())
    return int(found[1]) if found else None


def is_right(task: Mapping[str, Any], answer: str) -> bool:
    return bool(answered(answer) == task["result"])


def sums() -> list[Question]:
    """Return all questions about sums: two for each pair of numbers."""
    found = []
    for a, b in itertools.product(range(1, LARGEST + 1), repeat=2):
        for text in (f"What is {a} + {b}?", f"Anna has {a} cups and gets {b} more. How many are there?"):
            found.append(Question(text=text, agent=SUMS, working=f"{a} + {b} = {a + b}", result=a + b))
    return found


def conversions() -> list[Question]:
    """Return all questions about units: two for each conversion and number from 2 on."""
    found = []
    for (unit, other, factor), count in itertools.product(CONVERSIONS, range(2, LARGEST + 1)):
        result = count * factor
        for text in (f"How many {other} are {count} {unit}?", f"What are {count} {unit} in {other}?"):
            working = f"{count} {unit} = {result} {other}"
            found.append(Question(text=text, agent=UNITS, working=working, result=result))
    return found


def random_question(rng: random.Random) -> Question:
    """Return a question; both specialists are equally likely."""
    return rng.choice(sums() if rng.random() < 0.5 else conversions())


def write_tasks(path: Path, count: int = 256) -> None:
    """Write distinct questions as tasks, one JSON object per line, half of them for each specialist."""
    rng = random.Random(0)
    chosen = [*rng.sample(sums(), count // 2), *rng.sample(conversions(), count // 2)]
    rng.shuffle(chosen)
    lines = [
        json.dumps({"id": one.text, "question": one.text, "agent": one.agent, "result": one.result}) for one in chosen
    ]
    path.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    write_tasks(Path(__file__).with_name("tasks.jsonl"))
