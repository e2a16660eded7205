"""Weights & Biases, with one W&B run per run, under the run's id in the store."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from trainer.config import WandbSettings
from trainer.observe.metrics.sink import RunAbout, StepMetrics

# Bound on each of W&B's network waits, which would otherwise be minutes at the end of the process.
_SECONDS = 60


class WandbSink:
    """Writes to one W&B run. Charts are over versions; W&B's own step can only grow, so a version that is made again
    gets a new one."""

    def __init__(self, directory: Path, project: str, settings: WandbSettings) -> None:
        self._directory = directory
        self._project = project
        self._settings = settings
        self._run: Any = None
        self._axis = ""

    def open(self, run: RunAbout) -> None:
        library: Any = importlib.import_module("wandb")
        self._directory.mkdir(parents=True, exist_ok=True)
        self._run = library.init(
            entity=self._settings.entity,
            project=self._project,
            dir=str(self._directory),
            id=run.id,
            name=run.name,
            config=dict(run.config),
            mode=self._settings.mode,
            # Offline, whether the W&B run exists is unknown; `wandb sync` adds to the run of this id.
            resume="allow" if self._settings.mode == "online" else None,
            settings=library.Settings(
                console="off",
                silent=True,
                disable_git=True,
                disable_code=True,
                x_disable_meta=True,  # W&B would record the command line, which may contain keys
                init_timeout=_SECONDS,
                login_timeout=_SECONDS,
                finish_timeout=_SECONDS,
                reinit="create_new",  # a trainer of several runs has several W&B runs in one process
            ),
        )
        self._axis = run.axis
        self._run.define_metric(run.axis)
        self._run.define_metric("*", step_metric=run.axis)

    def write(self, step: StepMetrics) -> None:
        values = {self._axis: step.version, **step.metrics}
        # W&B drops a step number below its last one.
        self._run.log(values, step=max(step.version, self._run.step), commit=True)

    def close(self) -> None:
        self._run.finish()
