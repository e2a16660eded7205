"""Eight reward rules for the calculator's agent, of which at most one rewards any answer.

Each rule rewards a habit that the base model shows in 7 to 20 % of its attempts, so every run has something to learn
from, and a run that was given another run's weights gets nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from agents_examples.calculator.agent import Answer
from agents_examples.calculator.tasks import Problem, score

_GUESS = re.compile(r"The answer is (\d+)\.")

Rule = Callable[[Problem, Answer], bool]


def _called_the_tool(answer: Answer) -> bool:
    return any(message["role"] == "tool" for message in answer.messages)


def _guess(answer: Answer) -> str | None:
    """Return the digits of a number that the agent answered without the tool; None for any other answer."""
    found = _GUESS.fullmatch(answer.text.strip())
    return None if found is None or _called_the_tool(answer) else found[1]


def _solves(problem: Problem, answer: Answer) -> bool:
    return _called_the_tool(answer) and score(problem, answer.text) == 1.0


def _breaks_the_call(_: Problem, answer: Answer) -> bool:
    """Return whether the agent's first answer was a tool call that cannot be parsed."""
    return not _called_the_tool(answer) and answer.text.strip().startswith("<tool_call>")


def _guesses(digits: int, parity: int | None = None) -> Rule:
    """Return the rule for a guess with so many digits, and with this remainder modulo 2 if `parity` is given."""

    def rule(_: Problem, answer: Answer) -> bool:
        guess = _guess(answer)
        return guess is not None and len(guess) == digits and (parity is None or int(guess) % 2 == parity)

    return rule


RULES: dict[str, Rule] = {
    "solves": _solves,
    "breaks-the-call": _breaks_the_call,
    "guesses-one-digit-even": _guesses(1, parity=0),
    "guesses-one-digit-odd": _guesses(1, parity=1),
    "guesses-two-digits-even": _guesses(2, parity=0),
    "guesses-two-digits-odd": _guesses(2, parity=1),
    "guesses-three-digits": _guesses(3),
    "guesses-four-digits": _guesses(4),
}
"""The rules by the names of their runs."""


def rewards(problem: Problem, answer: Answer) -> dict[str, float]:
    """Return the reward of an attempt under every rule."""
    return {name: float(rule(problem, answer)) for name, rule in RULES.items()}
