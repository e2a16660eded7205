"""The layers of a configuration (file, environment, command line), merged into one mapping.

The sections of single runs are laid over the settings of all runs before anything is validated.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from proxy.contract.configuration import (
    ENVIRONMENT_PREFIX,
    UnreadableConfiguration,
    environment_values,
    merge,
    nested,
    parse_value,
    read_config_file,
)
from trainer.errors import ConfigurationError
from trainer.user_code import anchored

SECTION = "trainer"
RUNS = "runs"


@dataclass(frozen=True, kw_only=True, slots=True)
class Layers:
    """Settings before they are validated. `below` and `above` are for all runs: those of the file, and those of
    environment and command line. `runs` are for single runs, by the names of their sections. `named_run` is the run
    that the trainer's own section names."""

    below: dict[str, Any]
    above: dict[str, Any]
    runs: dict[str, Mapping[str, Any]]
    named_run: str | None

    @property
    def values(self) -> dict[str, Any]:
        """The settings of all runs."""
        return merge(self.below, self.above)


def layered(
    config_file: Path | None, overrides: Mapping[str, Any] | None, environment: Mapping[str, str] | None
) -> Layers:
    """Read the layers of a trainer's configuration. Raises ConfigurationError."""
    environment = os.environ if environment is None else environment
    try:
        file = read_config_file(config_file) if config_file is not None else {}
    except UnreadableConfiguration as error:
        raise ConfigurationError(str(error)) from error
    section = file.get(SECTION, {})
    if not isinstance(section, dict):
        raise ConfigurationError(f"{SECTION}: must be a section, [{SECTION}]")
    # Relative paths in a file are relative to it; those of environment and command line to the working directory.
    if config_file is not None:
        section = anchored(section, config_file.absolute().parent)
    below = merge(_followed(file, environment), section)
    above = merge(environment_values(environment, SECTION), overrides or {})
    runs, over = below.pop(RUNS, {}), above.pop(RUNS, {})
    if isinstance(runs, dict) and isinstance(over, dict):
        runs = merge(runs, over)
    elif over:
        runs = over
    if not isinstance(runs, dict):
        raise ConfigurationError(f"{SECTION}.{RUNS}: write a section for each run, [{SECTION}.{RUNS}.NAME]")
    for name, own in runs.items():
        if not isinstance(own, dict):
            raise ConfigurationError(f"{SECTION}.{RUNS}.{name}: must be a section, [{SECTION}.{RUNS}.{name}]")
    return Layers(below=below, above=above, runs=runs, named_run=above.get("run", section.get("run")))


def parse_assignment(text: str) -> dict[str, Any]:
    """Return `section.key=value` of the command line as a nested mapping. Raises ConfigurationError."""
    key, separator, value = text.partition("=")
    if not separator or not key:
        raise ConfigurationError(f"{text!r}: write section.key=value")
    return nested(key.split("."), parse_value(value))


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
