"""Settings of one run or of several, from file, environment and command line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from proxy.contract.configuration import merge
from trainer.config.layers import RUNS, SECTION, layered
from trainer.config.run import OF_THE_PROCESS, TrainerSettings
from trainer.config.section import NUMBER
from trainer.errors import ConfigurationError


def load_settings(
    config_file: Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
) -> TrainerSettings:
    """Read file and environment (default: the process's own) and lay `overrides`, a nested mapping, over both. The
    section of the run in `runs` goes before the settings of all runs, wherever those are written.

    Raises ConfigurationError with one line per wrong key.
    """
    values, runs, _ = layered(config_file, overrides, environment)
    name = values.get("run", TrainerSettings.model_fields["run"].default)
    lines: list[str] = []
    settings = _settings_of(name, values, runs.get(name, {}), lines) if isinstance(name, str) else None
    if settings is None:
        raise ConfigurationError("\n".join(lines) or f"{SECTION}.run: Input should be a valid string")
    return settings


def load_runs(
    config_file: Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
    only: Sequence[str] = (),
) -> dict[str, TrainerSettings]:
    """Return the settings of each run to train, by the name of its section: the runs in `only`, or all in `runs`, or
    `run` if there are no such sections.

    Raises ConfigurationError with one line per wrong key.
    """
    values, runs, named_run = layered(config_file, overrides, environment)
    if not only and not runs:
        alone = load_settings(config_file, overrides, environment)
        return {alone.run: alone}
    lines: list[str] = []
    found = {
        name: _settings_of(name, {**values, "run": name}, runs.get(name, {}), lines) for name in only or tuple(runs)
    }
    if lines:
        raise ConfigurationError("\n".join(dict.fromkeys(lines)))
    settings = {name: each for name, each in found.items() if each is not None}
    if not only and named_run is not None and all(each.run != named_run for each in settings.values()):
        raise ConfigurationError(
            f"{SECTION}.run: {named_run!r} is not one of {SECTION}.{RUNS} ({', '.join(runs)}): give it a section"
            " there, or leave it out"
        )
    _check_apart(settings)
    return settings


def _settings_of(
    name: str, values: Mapping[str, Any], own: Mapping[str, Any], lines: list[str]
) -> TrainerSettings | None:
    """Return the settings of all runs with those of this run laid over. If they are wrong, return None and add to
    `lines`."""
    place = f"{SECTION}.{RUNS}.{name}"
    lines += [f"{place}.{key}: is the same for all runs; set {SECTION}.{key}" for key in own if key in OF_THE_PROCESS]
    # A key for one proxy must not be sent to another.
    shared_url = values.get("proxy_url", TrainerSettings.model_fields["proxy_url"].default)
    own_url = own.get("proxy_url", shared_url)
    if own_url != shared_url and "api_key" not in own:
        lines.append(f"{place}.api_key: must be given, as {SECTION}.api_key is for {shared_url}, not for {own_url}")
    try:
        return TrainerSettings.model_validate(merge(values, own))
    except ValidationError as error:
        lines += _described(error, own, place)
        return None


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


def _described(error: ValidationError, own: Mapping[str, Any], place: str) -> list[str]:
    """Return a line per wrong key. It names the run's own section, `place`, if the key is set there, else the
    trainer's."""
    lines = []
    for detail in error.errors():
        path = [str(part) for part in detail["loc"] if part != NUMBER]
        is_own = bool(own) and (not path or path[0] in own)
        message = "no such option" if detail["type"] == "extra_forbidden" else detail["msg"]
        lines.append(f"{'.'.join((place if is_own else SECTION, *path))}: {message}")
    return lines
