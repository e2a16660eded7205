"""The metrics of a fit in the sinks of training: a run of its own there, over its optimiser steps."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

from proxy.contract.policy import Head
from trainer.config import TrainerSettings
from trainer.fit.fitting import Figures, Progress
from trainer.observe.metrics.sink import RunAbout
from trainer.observe.metrics.sinks import open_sinks


class Curve:
    """The record of one fit in the sinks; `close` it at the end. `config` contains the options of the fit."""

    def __init__(self, settings: TrainerSettings, head: Head, kind: str, config: Mapping[str, Any]) -> None:
        about = RunAbout(
            id=f"{head.run_id}-{kind}-{uuid.uuid4().hex[:8]}",
            name=f"{head.run_name}-{kind}-from-{head.version}",
            next_version=1,
            config={"run": head.run_name, "from_version": head.version, "kind": kind, **config},
            axis="step",
        )
        self._sinks = open_sinks(settings.metrics, about)
        self._step = 0

    def went_on(self, progress: Progress) -> None:
        self._step = progress.step
        told = {name: getattr(progress, name) for name in ("loss", "gradient_norm", "learning_rate")}
        self._sinks.put(progress.step, {**told, "epoch": float(progress.epoch)})

    def evaluated(self, figures: Figures) -> None:
        """Record the figures of held-out items at the last recorded step."""
        if figures:
            self._sinks.put(self._step, {f"held_out_{name}": value for name, value in figures.items()})

    def close(self) -> None:
        self._sinks.close()
