"""TensorBoard, as event files in a directory per run; `tensorboard --logdir DIRECTORY` shows them."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

from trainer.observe.metrics.sink import RunAbout, StepMetrics


class TensorboardSink:
    """Writes event files. Each start of the trainer adds a file, which replaces older files from its first step
    on."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._writer: Any = None

    def open(self, run: RunAbout) -> None:
        library: Any = importlib.import_module("torch.utils.tensorboard")
        self._writer = library.SummaryWriter(str(self._directory / run.id), purge_step=run.next_version)
        self._writer.add_text("config", f"```\n{json.dumps(run.config, indent=2)}\n```", run.next_version - 1)
        self._writer.flush()

    def write(self, step: StepMetrics) -> None:
        for name, value in step.metrics.items():
            self._writer.add_scalar(name, value, step.version, walltime=step.at)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
