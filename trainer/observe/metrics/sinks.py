"""The sinks of a run, created by their names in the configuration."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Mapping, Sequence

from trainer.config import MetricsSettings, SinkName
from trainer.errors import ConfigurationError
from trainer.observe.metrics.background import BackgroundSink
from trainer.observe.metrics.mlflow import MlflowSink
from trainer.observe.metrics.sink import RunAbout, Sink, StepMetrics
from trainer.observe.metrics.tensorboard import TensorboardSink
from trainer.observe.metrics.trackio import TrackioSink
from trainer.observe.metrics.wandb import WandbSink

CLOSE_SECONDS = 5.0
"""Seconds that the trainer waits at its end for all sinks together."""


class Sinks:
    """All sinks of a run: starts them, sends them each step, and ends them. Only the first rank has any."""

    def __init__(self, sinks: Mapping[str, Sink], run: RunAbout) -> None:
        self._sinks = [BackgroundSink(name, sink, run) for name, sink in sinks.items()]
        self._deadline: float | None = None

    def put(self, version: int, metrics: Mapping[str, float]) -> None:
        step = StepMetrics(version, time.time(), dict(metrics))
        for sink in self._sinks:
            sink.put(step)

    def finish(self) -> None:
        """Tell the sinks to end within `CLOSE_SECONDS`. With several runs, all sinks are notified before any is
        waited for, so that the end takes these seconds once."""
        for sink in self._sinks:
            sink.finish()
        self._deadline = self._deadline or time.monotonic() + CLOSE_SECONDS

    def close(self) -> None:
        """Wait until the sinks have ended."""
        self.finish()
        for sink in self._sinks:
            sink.join(self._deadline or 0.0)


def open_sinks(settings: MetricsSettings, run: RunAbout) -> Sinks:
    return Sinks({name.value: make_sink(name, settings) for name in settings.sinks}, run)


def check_installed(names: Sequence[SinkName]) -> None:
    """Raise ConfigurationError if the package of a sink is not installed."""
    for name in names:
        if importlib.util.find_spec(name.value) is None:
            raise ConfigurationError(
                f"trainer.metrics.sinks: {name.value} needs a package that is not installed:"
                f" in the clone, pip install -c constraints.txt -e '.[{name.value}]'"
            )


def check_directories(runs: Sequence[MetricsSettings]) -> None:
    """Raise ConfigurationError if the runs of one trainer have different directories for a sink that has one per
    process."""
    directories = sorted({str(each.directory) for each in runs if SinkName.TRACKIO in each.sinks})
    if len(directories) > 1:
        raise ConfigurationError(
            "trainer.metrics.directory: trackio has one directory in a process, and the runs name"
            f" {' and '.join(directories)}; give them the same one"
        )


def make_sink(name: SinkName, settings: MetricsSettings) -> Sink:
    directory = settings.directory.resolve() / name.value
    match name:
        case SinkName.TENSORBOARD:
            return TensorboardSink(directory)
        case SinkName.WANDB:
            return WandbSink(directory, settings.project, settings.wandb)
        case SinkName.MLFLOW:
            return MlflowSink(directory, settings.project, settings.mlflow)
        case SinkName.TRACKIO:
            return TrackioSink(directory, settings.project)
