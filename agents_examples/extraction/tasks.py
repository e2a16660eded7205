"""Orders and the texts that tell them. `python -m agents_examples.extraction.tasks` writes `tasks.jsonl`."""

from __future__ import annotations

import dataclasses
import json
import random
from dataclasses import dataclass
from pathlib import Path

NAMES = ("Anna", "Ben", "Clara", "David", "Emma", "Felix", "Greta", "Hugo", "Ines", "Jonas", "Karin", "Leo")
THINGS = ("cups", "lamps", "books", "chairs", "pens", "bikes", "clocks", "plates", "shirts", "maps")
CITIES = ("Oslo", "Rome", "Paris", "Vienna", "Madrid", "Lisbon", "Prague", "Dublin", "Athens", "Berlin")
PHRASINGS = (
    "{name} ordered {count} {thing} for {city}.",
    "Please send {count} {thing} to {city}. Thanks, {name}",
    "To {city}: {count} {thing}, paid by {name}.",
)
LARGEST_COUNT = 99


@dataclass(frozen=True, kw_only=True)
class Order:
    """What an extraction should find."""

    name: str
    count: int
    thing: str
    city: str


FIELDS = tuple(field.name for field in dataclasses.fields(Order))


@dataclass(frozen=True, kw_only=True)
class Text:
    """A text and the order that it tells."""

    text: str
    order: Order


def random_text(rng: random.Random) -> Text:
    """Return a text; names, counts, things, cities and phrasings are equally likely."""
    order = Order(
        name=rng.choice(NAMES), count=rng.randint(1, LARGEST_COUNT), thing=rng.choice(THINGS), city=rng.choice(CITIES)
    )
    return Text(text=rng.choice(PHRASINGS).format(**dataclasses.asdict(order)), order=order)


def write_tasks(path: Path, count: int = 256) -> None:
    """Write distinct texts as tasks, one JSON object per line."""
    rng = random.Random(0)
    distinct: dict[str, Text] = {}
    while len(distinct) < count:
        text = random_text(rng)
        distinct[text.text] = text
    lines = [json.dumps({"id": text.text, **dataclasses.asdict(text)}) for text in distinct.values()]
    path.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    write_tasks(Path(__file__).with_name("tasks.jsonl"))
