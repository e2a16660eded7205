"""Settings of one run or of several, from file, environment, command line, and the run's own table at its proxy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from proxy.contract.configuration import merge
from proxy.contract.policy import Head
from trainer.config.layers import RUNS, SECTION, layered
from trainer.config.run import OF_THE_PROCESS, TrainerSettings
from trainer.config.section import NUMBER
from trainer.config.weights import TRANSPORTS
from trainer.errors import ConfigurationError
from trainer.user_code import KEYS

_OF_THE_MACHINE = (*OF_THE_PROCESS, "proxy_url", "api_key", "run", "weights", "metrics", "profile")
"""Settings that a run's table at the proxy must not give: they are about the trainer's machine and its secrets."""


class Configuration:
    """The configuration of a trainer: file, environment (default: the process's own) and command line (`overrides`, a
    nested mapping). Raises ConfigurationError if they cannot be read."""

    def __init__(
        self,
        config_file: Path | None = None,
        overrides: Mapping[str, Any] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._layers = layered(config_file, overrides, environment)

    def alone(self, head: Head | None = None) -> TrainerSettings:
        """Return the settings of the only run, `run`. The section of that run in `runs` takes precedence over the
        settings of all runs, in whichever layer those are.

        With a `head`, they have the run's own settings of the trainer, over those of the file's `[trainer]`. Raises
        ConfigurationError with one line per wrong key.
        """
        name = self._layers.values.get("run", TrainerSettings.model_fields["run"].default)
        if not isinstance(name, str):
            raise ConfigurationError(f"{SECTION}.run: Input should be a valid string")
        return _validated(lambda lines: self._settings_of(name, {"run": name}, head, lines))

    def of_run(self, name: str, head: Head | None = None) -> TrainerSettings:
        """Return the settings of the run whose section is or would be called `name`, as `alone` does."""
        return _validated(lambda lines: self._settings_of(name, {"run": name}, head, lines))

    def runs(self, only: Sequence[str] = ()) -> dict[str, TrainerSettings]:
        """Return the settings of each run to train, by the name of its section: the runs in `only`, or all in `runs`,
        or `run` if there are no such sections.

        Raises ConfigurationError with one line per wrong key.
        """
        sections, named_run = self._layers.runs, self._layers.named_run
        if not only and not sections:
            alone = self.alone()
            return {alone.run: alone}
        lines: list[str] = []
        found = {name: self._settings_of(name, {"run": name}, None, lines) for name in only or tuple(sections)}
        if lines:
            raise ConfigurationError("\n".join(dict.fromkeys(lines)))
        settings = {name: each for name, each in found.items() if each is not None}
        if not only and named_run is not None and all(each.run != named_run for each in settings.values()):
            raise ConfigurationError(
                f"{SECTION}.run: {named_run!r} is not one of {SECTION}.{RUNS} ({', '.join(sections)}): give it a"
                " section there, or leave it out"
            )
        _check_apart(settings)
        return settings

    def _settings_of(
        self, name: str, named: Mapping[str, Any], head: Head | None, lines: list[str]
    ) -> TrainerSettings | None:
        """Return the settings of a run. If they are wrong, return None and add to `lines`."""
        place, own = f"{SECTION}.{RUNS}.{name}", self._layers.runs.get(name, {})
        lines += [
            f"{place}.{key}: is the same for all runs; set {SECTION}.{key}" for key in own if key in OF_THE_PROCESS
        ]
        # A key for one proxy must not be sent to another.
        shared_url = self._layers.values.get("proxy_url", TrainerSettings.model_fields["proxy_url"].default)
        own_url = own.get("proxy_url", shared_url)
        if own_url != shared_url and "api_key" not in own:
            lines.append(
                f"{place}.api_key: must be given, as {SECTION}.api_key is for {shared_url}, not for {own_url}"
            )
        table: Mapping[str, Any] = {} if head is None else head.trainer
        values = merge(merge(self._layers.below, table), merge(merge(self._layers.above, named), own))
        if head is not None:
            lines += _refused(head)
            values = _for_kind(values, head, lines)
        try:
            settings = TrainerSettings.model_validate(values)
        except ValidationError as error:
            lines += _described(error, own, place, table, "" if head is None else head.run_name)
            return None
        return settings if not lines else None


def load_settings(
    config_file: Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
) -> TrainerSettings:
    """Return `Configuration.alone` of these layers."""
    return Configuration(config_file, overrides, environment).alone()


def load_runs(
    config_file: Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
    only: Sequence[str] = (),
) -> dict[str, TrainerSettings]:
    """Return `Configuration.runs` of these layers."""
    return Configuration(config_file, overrides, environment).runs(only)


def _validated(settings_of: Callable[[list[str]], TrainerSettings | None]) -> TrainerSettings:
    lines: list[str] = []
    settings = settings_of(lines)
    if settings is None or lines:
        raise ConfigurationError("\n".join(dict.fromkeys(lines)))
    return settings


def _refused(head: Head) -> list[str]:
    """Return a line for each setting that a run's table at the proxy must not give."""
    place = _at_proxy(head.run_name)
    lines = [
        f"{place}.{key}: belongs to the trainer's machine; remove it there, and set {SECTION}.{key} for the trainer"
        for key in head.trainer
        if key in _OF_THE_MACHINE
    ]
    algorithm = head.trainer.get("algorithm")
    functions = [key for key in KEYS if isinstance(algorithm, Mapping) and key in algorithm]
    return lines + [
        f"{place}.algorithm.{key}: a function of your own is code on the trainer's machine; remove it there, and set"
        f" {SECTION}.{RUNS}.{head.run_name}.algorithm.{key} for the trainer"
        for key in functions
    ]


def _for_kind(values: dict[str, Any], head: Head, lines: list[str]) -> dict[str, Any]:
    """Return the values with an adapter of the default shape, if the run takes adapters and none is configured."""
    if head.weights_kind != "adapter":
        return values
    if values.get("layout") is not None or values.get("backend") == "archon":
        key = "layout" if values.get("layout") is not None else "backend"
        lines.append(
            f'{SECTION}.{key}: the run {head.run_name!r} has weights = "adapter", which only the backend fsdp trains;'
            f' remove {key}, or create a run with weights = "full"'
        )
    return {"adapter": {}, **values}


def _at_proxy(run: str) -> str:
    return f"run {run!r} at its proxy: {SECTION}"


def _check_apart(runs: Mapping[str, TrainerSettings]) -> None:
    """Raise ConfigurationError if two sections configure the same run."""
    seen: dict[tuple[str, str], str] = {}
    for name, settings in runs.items():
        other = seen.setdefault((settings.proxy_url.rstrip("/"), settings.run), name)
        if other != name:
            raise ConfigurationError(
                f"{SECTION}.{RUNS}.{name}: is {SECTION}.{RUNS}.{other}, the run {settings.run!r} of"
                f" {settings.proxy_url}, once more"
            )


def _described(
    error: ValidationError, own: Mapping[str, Any], place: str, table: Mapping[str, Any], run: str
) -> list[str]:
    """Return a line per wrong key. It names the place where the key is set: the run's own section, `place`, or the
    run's table at the proxy, or else the trainer's section."""
    lines = []
    for detail in error.errors():
        path = [str(part) for part in detail["loc"] if part not in (NUMBER, *TRANSPORTS)]
        where = SECTION
        if own and (not path or path[0] in own):
            where = place
        if path and _has(table, path) and not _has(own, path):
            where = _at_proxy(run)
        message = "no such option" if detail["type"] == "extra_forbidden" else detail["msg"]
        lines.append(f"{'.'.join((where, *path))}: {message}")
    return lines


def _has(values: Any, path: Sequence[str]) -> bool:
    """Return whether a nested mapping has a value at a path."""
    for part in path:
        if not isinstance(values, Mapping) or part not in values:
            return False
        values = values[part]
    return True
