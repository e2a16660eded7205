"""The agent's questions, its tool, and the scoring of its answers.

`python -m agents_examples.calculator.tasks` writes `tasks.jsonl`, a file of questions for `base-rl attempts`.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import operator
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletionFunctionToolParam

OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
PHRASINGS = ("What is {}?", "Compute {}.", "Please work out {}.")
LARGEST_OPERAND = 99
LARGEST_ARGUMENT = 999_999_999

CALCULATOR: ChatCompletionFunctionToolParam = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Works out a op b.",
        "parameters": {
            "type": "object",
            "properties": {
                "a": {"type": "integer"},
                "b": {"type": "integer"},
                "op": {"type": "string", "enum": ["+", "-", "*"]},
            },
            "required": ["a", "b", "op"],
        },
    },
}


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Two operands from 0 to 99, one of + - *, and the phrasing of the question."""

    a: int
    op: str
    b: int
    phrasing: str = PHRASINGS[0]

    @property
    def expression(self) -> str:
        return f"{self.a} {self.op} {self.b}"

    @property
    def question(self) -> str:
        return self.phrasing.format(self.expression)

    @property
    def result(self) -> int:
        return int(OPERATIONS[self.op](self.a, self.b))


def random_problem(rng: random.Random) -> Problem:
    """Return a problem; all operands, operations and phrasings are equally likely."""
    return Problem(
        a=rng.randint(0, LARGEST_OPERAND),
        op=rng.choice(list(OPERATIONS)),
        b=rng.randint(0, LARGEST_OPERAND),
        phrasing=rng.choice(PHRASINGS),
    )


def problems(seed: int) -> Iterator[Problem]:
    """Yield problems without end; equal seeds give equal problems."""
    rng = random.Random(seed)
    while True:
        yield random_problem(rng)


def calculate(arguments: str) -> str:
    """Run the tool: return the result of a call's JSON arguments, or text that begins with `error` and names the
    mistake."""
    try:
        call = json.loads(arguments)
    except ValueError:
        return "error: the arguments are not JSON"
    if not isinstance(call, dict) or call.keys() != {"a", "b", "op"}:
        return "error: the arguments are an object with a, b and op"
    if type(call["a"]) is not int or type(call["b"]) is not int:
        return "error: a and b are integers"
    if max(abs(call["a"]), abs(call["b"])) > LARGEST_ARGUMENT:
        return "error: a and b have nine digits at most"
    if not isinstance(call["op"], str) or call["op"] not in OPERATIONS:
        return "error: op is one of + - *"
    return str(OPERATIONS[call["op"]](call["a"], call["b"]))


def score(problem: Problem, answer: str) -> float:
    """Return 1.0 for exactly `The answer is N.` with the right N, else 0.0; surrounding white space is ignored."""
    return float(answer.strip() == f"The answer is {problem.result}.")


def write_tasks(path: Path, count: int = 256) -> None:
    """Write distinct problems as tasks, one JSON object per line."""
    distinct = {problem.expression: problem for problem in itertools.islice(problems(0), 2 * count)}
    lines = [
        json.dumps({"id": expression, "question": problem.question, **dataclasses.asdict(problem)})
        for expression, problem in itertools.islice(distinct.items(), count)
    ]
    path.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    write_tasks(Path(__file__).with_name("tasks.jsonl"))
