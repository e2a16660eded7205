"""What the trainer asks of a place where metrics go."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol


@dataclass(frozen=True, kw_only=True)
class RunAbout:
    """`id` is the run's in its store, never used for another: a trainer that starts again goes on in what it names.
    `next_version` is the first that will be told; `config` is the trainer's, nested, without keys and addresses.
    `axis` is what its numbers count: of a fit, a run of its own, optimiser steps in the place of versions."""

    id: str
    name: str
    next_version: int
    config: Mapping[str, Any]
    axis: str = "version"


class StepMetrics(NamedTuple):
    """Of the step that made `version`, at `at` (Unix seconds)."""

    version: int
    at: float
    metrics: Mapping[str, float]


class Sink(Protocol):
    """Called from one thread only. Anything may raise, and may take as long as it likes (`background.py`).

    Where `open` raised it is called again before the next step. Versions come in order, but a version may come again,
    or after a higher one, where the run was set back.
    """

    def open(self, run: RunAbout) -> None: ...

    def write(self, step: StepMetrics) -> None: ...

    def close(self) -> None: ...


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one, with dotted keys."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found
