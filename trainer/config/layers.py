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
    """Settings before they are validated.

    `below` and `above` apply to all runs: `below` comes from the file, `above` from environment and command line.
    `runs` has the sections of single runs by name. `named_run` is the run that the trainer's own section names.
    """

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
    """Read the layers of a trainer's configuration. Raise ConfigurationError."""
    environment = os.environ if environment is None else environment
    try:
        file = read_config_file(config_file) if config_file is not None else {}
        defaults = _from_the_proxy(file, environment)
        above = merge(environment_values(environment, SECTION), overrides or {})
    except UnreadableConfiguration as error:
        raise ConfigurationError(str(error)) from error
    section = file.get(SECTION, {})
    if not isinstance(section, dict):
        raise ConfigurationError(f"{SECTION}: must be a section, [{SECTION}]")
    # Relative paths in the file are relative to the file, all others to the working directory.
    if config_file is not None:
        section = anchored(section, config_file.absolute().parent)
    below = merge(defaults, section)
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
    """Return `section.key=value` of the command line as a nested mapping. Raise ConfigurationError."""
    key, separator, value = text.partition("=")
    if not separator or not key:
        raise ConfigurationError(f"{text!r}: write section.key=value")
    return nested(key.split("."), parse_value(value))


def _from_the_proxy(file: Mapping[str, Any], environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the trainer's defaults that the proxy's sections determine. Raise UnreadableConfiguration."""

    def values_of(section: str) -> dict[str, Any]:
        in_file = file.get(section)
        return merge(in_file if isinstance(in_file, dict) else {}, environment_values(environment, section))

    run, server = values_of("run"), values_of("server")
    values: dict[str, Any] = {}
    if (name := run.get("name")) is not None:
        values["run"] = name
    if (url := server.get("public_url")) is not None:
        values["proxy_url"] = url
    if (data_dir := server.get("data_dir")) is not None:
        for section, folder in (("weights", "weights"), ("metrics", "metrics"), ("profile", "profiles")):
            values[section] = {"directory": str(Path(str(data_dir)) / folder)}
    return values
