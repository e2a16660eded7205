"""The layers of a configuration (file, environment, command line), merged into one mapping.

The trainer does not use pydantic-settings for this, because the sections of single runs are laid over the settings
of all runs before anything is validated.
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.errors import ConfigurationError
from trainer.user_code import anchored

ENVIRONMENT_PREFIX = "BASE_RL_"
SECTION = "trainer"
RUNS = "runs"


def layered(
    config_file: Path | None, overrides: Mapping[str, Any] | None, environment: Mapping[str, str] | None
) -> tuple[dict[str, Any], dict[str, Mapping[str, Any]], str | None]:
    """Return the settings of all runs, the settings of single runs by name, and the run that the trainer's own
    section names."""
    environment = os.environ if environment is None else environment
    file = _read(config_file) if config_file is not None else {}
    values = _followed(file, environment)
    section = file.get(SECTION, {})
    if not isinstance(section, dict):
        raise ConfigurationError(f"{SECTION}: must be a section, [{SECTION}]")
    if config_file is not None:
        section = anchored(section, config_file.absolute().parent)
    told = None
    for layer in (section, _from_environment(environment), overrides or {}):
        values, told = merge(values, layer), layer.get("run", told)
    runs = values.pop(RUNS, {})
    if not isinstance(runs, dict):
        raise ConfigurationError(f"{SECTION}.{RUNS}: write a section for each run, [{SECTION}.{RUNS}.NAME]")
    for name, own in runs.items():
        if not isinstance(own, dict):
            raise ConfigurationError(f"{SECTION}.{RUNS}.{name}: must be a section, [{SECTION}.{RUNS}.{name}]")
    return values, runs, told


def parse_assignment(text: str) -> dict[str, Any]:
    """Return `section.key=value` of the command line as a nested mapping. Raises ConfigurationError."""
    key, separator, value = text.partition("=")
    if not separator or not key:
        raise ConfigurationError(f"{text!r}: write section.key=value")
    return _nested(key.split("."), _parsed(value))


def _read(config_file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(config_file.read_text())
    except OSError as error:
        raise ConfigurationError(f"cannot read {config_file}: {error.strerror or error}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigurationError(f"{config_file} is not valid TOML: {error}") from error


def _followed(file: Mapping[str, Any], environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the trainer's defaults that follow from the proxy's own sections."""

    def proxy_value(section: str, key: str) -> Any:
        in_file = file.get(section)
        default = in_file.get(key) if isinstance(in_file, dict) else None
        return environment.get(f"{ENVIRONMENT_PREFIX}{section}__{key}".upper(), default)

    values: dict[str, Any] = {}
    for section, key, ours in (("run", "name", "run"), ("server", "public_url", "proxy_url")):
        if (value := proxy_value(section, key)) is not None:
            values[ours] = value
    if (data_dir := proxy_value("server", "data_dir")) is not None:
        for section, folder in (("weights", "weights"), ("metrics", "metrics"), ("profile", "profiles")):
            values[section] = {"directory": str(Path(data_dir) / folder)}
    return values


def _from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    prefix = f"{ENVIRONMENT_PREFIX}{SECTION}__".upper()
    values: dict[str, Any] = {}
    for name, text in sorted(environment.items()):
        if name.upper().startswith(prefix):
            values = merge(values, _nested(name[len(prefix) :].lower().split("__"), _parsed(text)))
    return values


def _parsed(text: str) -> Any:
    """Parse lists, tables and null as JSON. All other values stay text, which the types of the settings then read."""
    if text == "null" or text[:1] in {"[", "{"}:
        try:
            return json.loads(text)
        except json.JSONDecodeError:
            return text
    return text


def _nested(path: list[str], value: Any) -> dict[str, Any]:
    for part in reversed(path):
        value = {part: value}
    return dict(value)


def merge(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(under)
    for key, value in over.items():
        below = merged.get(key)
        merged[key] = merge(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return merged
