"""Trackio: a local database, or the server that TRACKIO_SPACE_ID or TRACKIO_SERVER_URL names; `trackio show` shows
it."""

from __future__ import annotations

import importlib
import os
import threading
from pathlib import Path
from typing import Any

from trainer.observe.metrics.sink import RunAbout, StepMetrics

# Trackio's runs of one process share its local files, and it only warns of records that it could not store. Two runs
# that are opened or ended at the same moment may lose the records of one, so they do it one after another.
_ONE_AT_A_TIME = threading.Lock()


class TrackioSink:
    """Writes to one Trackio run. Trackio identifies runs by name, so the name contains the id."""

    def __init__(self, directory: Path, project: str) -> None:
        self._directory = directory
        self._project = project
        self._run: Any = None

    def open(self, run: RunAbout) -> None:
        os.environ.setdefault("TRACKIO_DIR", str(self._directory))
        library: Any = importlib.import_module("trackio")
        with _ONE_AT_A_TIME:
            self._run = library.init(
                project=self._project,
                name=f"{run.name}-{run.id}",
                config=dict(run.config),
                resume="allow",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )

    def write(self, step: StepMetrics) -> None:
        self._run.log(dict(step.metrics), step=step.version)

    def close(self) -> None:
        with _ONE_AT_A_TIME:
            self._run.finish()
