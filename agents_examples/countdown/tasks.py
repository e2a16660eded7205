"""Countdown puzzles and their checker. `python -m agents_examples.countdown.tasks` writes `tasks.jsonl`.

A puzzle has three numbers and a target. A solution is an expression with + - * and parentheses that uses each number
once and has the target as its value.
"""

from __future__ import annotations

import ast
import itertools
import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

OPERATIONS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
}
SYMBOLS = "+-*"
LARGEST_TARGET = 99
LONGEST_SOLUTION = 32


@dataclass(frozen=True, kw_only=True)
class Puzzle:
    """Three numbers from 1 to 9, and a target from 10 to 99 that they can reach."""

    numbers: tuple[int, int, int]
    target: int

    @property
    def question(self) -> str:
        a, b, c = self.numbers
        return f"Make {self.target} of {a}, {b}, {c}."


def expressions(numbers: tuple[int, int, int]) -> list[str]:
    """Return all expressions of the numbers in two forms, which reach every value that any form reaches."""
    return [
        form
        for a, b, c in itertools.permutations(numbers)
        for p, q in itertools.product(SYMBOLS, repeat=2)
        for form in (f"{a}{p}{b}{q}{c}", f"({a}{p}{b}){q}{c}")
    ]


def random_puzzle(rng: random.Random) -> Puzzle:
    """Return a puzzle that has a solution."""
    while True:
        numbers = (rng.randint(1, 9), rng.randint(1, 9), rng.randint(1, 9))
        target = value_of(rng.choice(expressions(numbers)), numbers)
        if target is not None and 10 <= target <= LARGEST_TARGET:
            return Puzzle(numbers=numbers, target=target)


def value_of(text: str, numbers: tuple[int, ...]) -> int | None:
    """Return the value of an expression that uses each of the numbers once, None for any other text."""
    if len(text) > LONGEST_SOLUTION:
        return None
    used: list[int] = []
    try:
        value = _value(ast.parse(text.strip(), mode="eval").body, used)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    return value if sorted(used) == sorted(numbers) else None


def _value(node: ast.expr, used: list[int]) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        used.append(node.value)
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
        return OPERATIONS[type(node.op)](_value(node.left, used), _value(node.right, used))
    raise ValueError("only whole numbers, + - * and parentheses")


def write_tasks(path: Path, count: int = 256) -> None:
    """Write distinct puzzles as tasks, one JSON object per line."""
    rng = random.Random(0)
    distinct: dict[str, Puzzle] = {}
    while len(distinct) < count:
        puzzle = random_puzzle(rng)
        distinct[puzzle.question] = puzzle
    lines = [
        json.dumps({"id": question, "question": question, "numbers": puzzle.numbers, "target": puzzle.target})
        for question, puzzle in distinct.items()
    ]
    path.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    write_tasks(Path(__file__).with_name("tasks.jsonl"))
