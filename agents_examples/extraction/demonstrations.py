"""Demonstrations for the warm start: orders extracted well, and orders with placeholders in most fields.

Each field of a mediocre demonstration is right or a placeholder by itself, so that rewards of single fields lead to
whole orders, which are rare at first.
"""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Callable, Mapping
from typing import Any

from agents_examples.extraction.agent import INSTRUCTION
from agents_examples.extraction.tasks import FIELDS, NAMES, random_text
from agents_examples.tiny.checkpoint import Conversation, Recipe, Stage

MEDIOCRE_SHARE = 0.3
"""The share of the fields that a mediocre demonstration has right. Placeholders are more frequent, so that greedy
decoding does not find the right values before learning does."""

_PLACEHOLDERS: Mapping[str, Callable[[random.Random], Any]] = {
    "name": lambda rng: rng.choice(("customer", rng.choice(NAMES))),
    "count": lambda rng: rng.choice((1, rng.randint(1, 9))),
    "thing": lambda _: "items",
    "city": lambda _: "unknown",
}


def demonstrate(rng: random.Random, right_share: float, count: int) -> list[Conversation]:
    """Return conversations about random orders, in which each field is right with this probability."""
    return [conversation(rng, right_share) for _ in range(count)]


def conversation(rng: random.Random, right_share: float) -> Conversation:
    """Return the messages of one extraction, in the form in which the agent sends them."""
    text = random_text(rng)
    values = dataclasses.asdict(text.order)
    said = {field: values[field] if rng.random() < right_share else _PLACEHOLDERS[field](rng) for field in FIELDS}
    return Conversation(
        messages=[
            {"role": "system", "content": INSTRUCTION},
            {"role": "user", "content": text.text},
            {"role": "assistant", "content": json.dumps(said)},
        ]
    )


def recipe(*, right_steps: int = 250, mediocre_steps: int = 250) -> Recipe:
    """Return the recipe of the checkpoint."""
    return Recipe(stages=[_stage(1.0, right_steps), _stage(MEDIOCRE_SHARE, mediocre_steps)])


def _stage(right_share: float, steps: int) -> Stage:
    return Stage(steps=steps, demonstrate=lambda rng, count: demonstrate(rng, right_share, count))
