"""The sums. `python -m agents_examples.retry.tasks` writes `tasks.jsonl`."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path

LARGEST_TERM = 9
PHRASINGS = ("What is {}?", "Please add {}.")


@dataclass(frozen=True, kw_only=True)
class Sum:
    """Two terms from 1 to 9, and the phrasing of the question."""

    a: int
    b: int
    phrasing: str = PHRASINGS[0]

    @property
    def expression(self) -> str:
        return f"{self.a} + {self.b}"

    @property
    def question(self) -> str:
        return self.phrasing.format(self.expression)

    @property
    def result(self) -> int:
        return self.a + self.b


def random_sum(rng: random.Random) -> Sum:
    """Return a sum; all terms and phrasings are equally likely."""
    return Sum(a=rng.randint(1, LARGEST_TERM), b=rng.randint(1, LARGEST_TERM), phrasing=rng.choice(PHRASINGS))


def all_sums() -> list[Sum]:
    """Return every sum once, with phrasings in turn, in the order of the terms."""
    terms = range(1, LARGEST_TERM + 1)
    return [Sum(a=a, b=b, phrasing=PHRASINGS[(a + b) % len(PHRASINGS)]) for a in terms for b in terms]


def write_tasks(path: Path) -> None:
    """Write all sums as tasks, one JSON object per line."""
    lines = [json.dumps({"id": one.expression, "question": one.question, "result": one.result}) for one in all_sums()]
    path.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    write_tasks(Path(__file__).with_name("tasks.jsonl"))
