"""Errands, and the user who has one. `python -m agents_examples.assistant.tasks` writes `tasks.jsonl`.

The user is a program: it looks at the reminders and says in words whether they are what it asked for.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

THINGS = (
    "call Anna",
    "buy milk",
    "water the plants",
    "feed the cat",
    "pay the rent",
    "take the train",
    "visit Hugo",
    "bake a cake",
    "fix the bike",
    "read a book",
)
LATEST_HOUR = 12
PHRASINGS = ("Remind me at {at} to {what}.", "At {at} I have to {what}.", "Please note: {what} at {at}.")

THANKS = "Thanks, that is what I wanted."
NO_REMINDER = "No, there is no reminder."
OTHER_REMINDER = "No, that is another reminder."
NEVER_MIND = "Never mind."


@dataclass(frozen=True, kw_only=True)
class Reminder:
    """A thing to do, and the hour to do it."""

    at: int
    what: str


@dataclass(frozen=True, kw_only=True)
class Errand:
    """The reminder that a user wants, and the phrasing of the request."""

    wanted: Reminder
    phrasing: str = PHRASINGS[0]

    @property
    def request(self) -> str:
        return self.phrasing.format(at=self.wanted.at, what=self.wanted.what)

    def comment(self, reminders: Sequence[Reminder]) -> str:
        """Return what the user says on seeing the reminders, of which the newest counts."""
        if not reminders:
            return NO_REMINDER
        return THANKS if reminders[-1] == self.wanted else OTHER_REMINDER


def random_errand(rng: random.Random) -> Errand:
    """Return an errand; things, hours and phrasings are equally likely."""
    wanted = Reminder(at=rng.randint(1, LATEST_HOUR), what=rng.choice(THINGS))
    return Errand(wanted=wanted, phrasing=rng.choice(PHRASINGS))


def write_tasks(path: Path, count: int = 256) -> None:
    """Write distinct errands as tasks, one JSON object per line."""
    rng = random.Random(0)
    distinct: dict[str, Errand] = {}
    while len(distinct) < count:
        errand = random_errand(rng)
        distinct[errand.request] = errand
    lines = [
        json.dumps({"id": request, "phrasing": one.phrasing, "at": one.wanted.at, "what": one.wanted.what})
        for request, one in distinct.items()
    ]
    path.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    write_tasks(Path(__file__).with_name("tasks.jsonl"))
