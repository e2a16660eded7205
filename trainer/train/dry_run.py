"""The resolved configuration, as `--dry-run` prints it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict
from typing import Any

from trainer.algorithm.parts import as_json
from trainer.algorithm.presets import resolve
from trainer.config import OF_THE_PROCESS, TrainerSettings
from trainer.parallel.layout import layout_of


def resolved(runs: Mapping[str, TrainerSettings]) -> dict[str, Any]:
    """Return the configuration of a run; of several, the settings of the process, and each run's own in `runs`."""
    worlds = [layout.world for each in runs.values() if (layout := layout_of(each)) is not None]
    if worlds:
        runs = {name: settings.model_copy(update={"nproc": worlds[0]}) for name, settings in runs.items()}
    values = {name: _resolved_run(settings) for name, settings in runs.items()}
    if len(values) == 1:
        return next(iter(values.values()))
    common = {key: value for key, value in next(iter(values.values())).items() if key in OF_THE_PROCESS}
    return {**common, "runs": {name: _without(each, common) for name, each in values.items()}}


def _without(values: Mapping[str, Any], keys: Collection[str]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key not in keys}


def _resolved_run(settings: TrainerSettings) -> dict[str, Any]:
    algorithm = resolve(settings.algorithm)
    parts = as_json(algorithm) | {part: asdict(function) for part, function in algorithm.user_functions.items()}
    return {**settings.model_dump(mode="json"), "algorithm": {"preset": settings.algorithm.preset, **parts}}
