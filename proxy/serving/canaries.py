"""Refuse a canary or a shadow for which no engine could ever be set apart."""

from __future__ import annotations

from collections.abc import Sequence

from proxy.runs.service import CheckModel
from proxy.serving.configured import EngineSpec
from proxy.serving.registry import EngineRegistry
from proxy.settings import ConfigurationError, RunSettings

# One engine for the version that serves, and one for the candidate.
_ENGINES_NEEDED = 2


class CanaryCheck:
    """Checks the settings of a run: those of its model, by `check_model`, and whether its candidates have engines."""

    def __init__(self, check_model: CheckModel, *, registry: EngineRegistry, specs: Sequence[EngineSpec]) -> None:
        """`specs` are the engines of the configuration, which are only in the registry once the proxy has started."""
        self._check_model = check_model
        self._registry = registry
        self._specs = specs

    async def __call__(self, base_model: str, settings: RunSettings) -> None:
        """Raise ConfigurationError."""
        await self._check_model(base_model, settings)
        trials = settings.release.trials
        if settings.weights == "adapter" or not trials:
            return
        engines = [(each.name, each.base_model, each.run) for each in self._specs]
        engines += [(each.name, each.base_model, each.run) for each in self._registry.records]
        able = {name for name, model, run in engines if model == base_model and run in (None, settings.name)}
        if len(able) < _ENGINES_NEEDED:
            raise ConfigurationError(
                f"run.release.{trials[0]}: the run {settings.name!r} has whole weights, so a candidate that is tried"
                f" needs an engine of its own beside the one that serves; {len(able)} can serve the run: set"
                " engine.replicas to 2, add an engine (`base-rl engines add`), train adapters"
                f' (run.weights = "adapter"), or set {" and ".join(f"release.{each}" for each in trials)} to 0'
            )
