"""The interface of a destination of metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol


@dataclass(frozen=True, kw_only=True)
class RunAbout:
    """The run whose metrics are sent.

    - `id` is the run's id in its store. A trainer that starts again continues the same record.
    - `next_version` is the first version that will be sent.
    - `config` is the trainer's configuration, nested, without keys and addresses.
    - `axis` names what the numbers of versions count: for a fit, which is a run of its own, these are optimiser
      steps.
    """

    id: str
    name: str
    next_version: int
    config: Mapping[str, Any]
    axis: str = "version"


class StepMetrics(NamedTuple):
    """The metrics of the step that made `version`, at `at` (Unix seconds)."""

    version: int
    at: float
    metrics: Mapping[str, float]


class Sink(Protocol):
    """A destination of metrics, called from one thread. Any method may raise and may block (`background.py`).

    If `open` raises, it is called again before the next step. Versions come in order, but a version may come again,
    or after a higher one, if the run was set back.
    """

    def open(self, run: RunAbout) -> None: ...

    def write(self, step: StepMetrics) -> None: ...

    def close(self) -> None: ...


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested mappings as one mapping with dotted keys."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found
