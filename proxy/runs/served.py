"""The run that this process serves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from proxy.contract.identifiers import RunId
from proxy.contract.policy import WeightsFormat
from proxy.runs.service import RunView


@dataclass(frozen=True, kw_only=True)
class ServedRun:
    """The run whose model calls this process answers, with the limits of its model and its engine.

    `context_length` is in tokens. `weight_formats` returns the formats that a run's engine loads; None for a run that
    is not served here and while the engine has not reported its formats.
    """

    run: RunView
    context_length: int
    weight_formats: Callable[[RunId], tuple[WeightsFormat, ...] | None]
