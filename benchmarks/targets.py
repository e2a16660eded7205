"""Targets of benchmarks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Target:
    """A figure with its bound: an upper one, or a lower one with `at_least`."""

    what: str
    measured: float
    bound: float
    at_least: bool = False

    @property
    def reached(self) -> bool:
        return self.measured >= self.bound if self.at_least else self.measured <= self.bound


def target_rows(targets: Iterable[Target]) -> list[list[str]]:
    """Return the rows of a table: figure, bound, measured value."""
    return [
        [each.what, f"{'≥' if each.at_least else '≤'} {each.bound:g}", f"{each.measured:.2f}"] for each in targets
    ]
