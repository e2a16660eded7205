"""Analyzers as users write them: one that returns objects like Presidio, one that returns tuples, one that fails."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass
class Result:
    start: int
    end: int
    entity_type: str = "PERSON"


def people(text: str) -> Iterator[Result]:
    at = text.find("Quirinius")
    if at >= 0:
        yield Result(at, at + len("Quirinius"))


def colours(text: str) -> list[tuple[int, int]]:
    return [(at, at + 3) for at in range(len(text)) if text.startswith("red", at)]


def broken(text: str) -> list[tuple[int, int]]:
    raise RuntimeError(text)
