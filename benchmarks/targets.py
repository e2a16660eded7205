"""What a benchmark is to reach."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Target:
    """`measured` must not exceed `bound`, or not fall below it."""

    what: str
    measured: float
    bound: float
    at_least: bool = False

    @property
    def reached(self) -> bool:
        return self.measured >= self.bound if self.at_least else self.measured <= self.bound


def target_rows(targets: Iterable[Target]) -> list[list[str]]:
    """What, bound, measured: a table's rows."""
    return [
        [each.what, f"{'≥' if each.at_least else '≤'} {each.bound:g}", f"{each.measured:.2f}"] for each in targets
    ]
