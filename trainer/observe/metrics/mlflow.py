"""MLflow, with one MLflow run per run, found by a tag."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

from trainer.config import MlflowSettings
from trainer.observe.metrics.sink import RunAbout, StepMetrics, flat

TAG = "base_rl.run_id"
# Bounds of MLflow's own API, per request and per value.
_MOST_PARAMETERS = 100
_LONGEST_PARAMETER = 500


class MlflowSink:
    """Writes to one MLflow run. Its configuration is that of the first start, since MLflow's parameters cannot
    change."""

    def __init__(self, directory: Path, experiment: str, settings: MlflowSettings) -> None:
        self._directory = directory
        self._experiment = experiment
        self._settings = settings
        self._client: Any = None
        self._entities: Any = None
        self._run_id = ""

    def open(self, run: RunAbout) -> None:
        library: Any = importlib.import_module("mlflow")
        self._entities = importlib.import_module("mlflow.entities")
        self._client = library.MlflowClient(tracking_uri=self._tracking_uri())
        experiment = self._client.get_experiment_by_name(self._experiment)
        experiment_id = (
            experiment.experiment_id if experiment is not None else self._client.create_experiment(self._experiment)
        )
        found = self._client.search_runs([experiment_id], f"tags.`{TAG}` = '{run.id}'", max_results=1)
        if found:
            self._run_id = found[0].info.run_id
            self._client.update_run(self._run_id, status="RUNNING")
            return
        self._run_id = self._client.create_run(experiment_id, tags={TAG: run.id}, run_name=run.name).info.run_id
        parameters = [
            self._entities.Param(name, str(value)[:_LONGEST_PARAMETER]) for name, value in flat(run.config).items()
        ]
        for start in range(0, len(parameters), _MOST_PARAMETERS):
            self._client.log_batch(self._run_id, params=parameters[start : start + _MOST_PARAMETERS])

    def write(self, step: StepMetrics) -> None:
        at = int(step.at * 1000)
        metrics = [self._entities.Metric(name, value, at, step.version) for name, value in step.metrics.items()]
        self._client.log_batch(self._run_id, metrics=metrics)

    def close(self) -> None:
        self._client.set_terminated(self._run_id)

    def _tracking_uri(self) -> str:
        uri = self._settings.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")
        if uri is None:
            self._directory.mkdir(parents=True, exist_ok=True)
            uri = f"sqlite:///{self._directory / 'mlflow.sqlite3'}"
        return uri
