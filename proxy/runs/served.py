"""Figures of the runs that engines serve here, for rooms that know neither engines nor models."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from proxy.contract.identifiers import RunId
from proxy.contract.policy import WeightsFormat
from proxy.runs.service import RunView


@dataclass(frozen=True, kw_only=True)
class ServedRuns:
    """The runs whose model calls this process answers, with the limits of their models and engines.

    `first_run` is the first run of the configuration. `is_placed` returns whether an engine is there for a run, ready
    or not. `context_length` returns that of the run's model in tokens; None if the model cannot be loaded.
    `weight_formats` returns the formats that the run's engines load; None for a run without an engine, and while its
    engines have not reported them. `engines` returns how many serve a run.
    """

    first_run: RunView
    is_placed: Callable[[str], bool]
    context_length: Callable[[RunView], Awaitable[int | None]]
    weight_formats: Callable[[RunId], tuple[WeightsFormat, ...] | None]
    engines: Callable[[RunId], int] = lambda _: 0
