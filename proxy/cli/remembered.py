"""The options of a data directory's last start, with which `base-rl up --data-dir DIR` starts again.

Only options that are recorded nowhere else are stored: those of the command line and of the environment, and the path
of the configuration file, but not its contents. base-rl never removes the file: `rm DIR/started.json` resets the
options.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from proxy.settings import ConfigurationError, EngineKind

FILE_NAME = "started.json"

Overrides = dict[str, dict[str, Any]]

_OPTIONS = {
    ("run", "model"): "--model",
    ("run", "name"): "--run",
    ("engine", "kind"): "--engine",
    ("engine", "script"): "--script",
    ("server", "host"): "--host",
    ("server", "port"): "--port",
}


@dataclass(frozen=True, kw_only=True)
class StartOptions:
    """`overrides` are options by section and key; None stands for an option that was not given."""

    config: Path | None = None
    overrides: Overrides = field(default_factory=dict)
    trainer: bool | None = None
    nproc: int | None = None
    seed: int | None = None


class _Stored(msgspec.Struct, frozen=True, kw_only=True):
    config: str | None = None
    overrides: dict[str, dict[str, str | int]] = {}
    trainer: bool | None = None
    nproc: int | None = None
    seed: int | None = None


def read_remembered(data_dir: Path) -> StartOptions | None:
    """Return the options of the last start, or None where there was none. Raises ConfigurationError for a file that
    cannot be read."""
    path = data_dir / FILE_NAME
    try:
        stored = msgspec.json.decode(path.read_bytes(), type=_Stored)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigurationError(f"{path} cannot be read ({error}): remove it, and give the options again") from error
    return StartOptions(
        config=None if stored.config is None else Path(stored.config),
        overrides={section: dict(keys) for section, keys in stored.overrides.items()},
        trainer=stored.trainer,
        nproc=stored.nproc,
        seed=stored.seed,
    )


def remember(data_dir: Path, options: StartOptions) -> None:
    """Write the options for the next start. The file appears whole or not at all, readable by its owner only."""
    stored = _Stored(
        config=None if options.config is None else str(options.config.resolve()),
        overrides={
            section: {key: value if isinstance(value, int) else str(value) for key, value in keys.items()}
            for section, keys in options.overrides.items()
        },
        trainer=options.trainer,
        nproc=options.nproc,
        seed=options.seed,
    )
    partial = data_dir / f".{FILE_NAME}.{os.getpid()}"
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(msgspec.json.format(msgspec.json.encode(stored)))
    partial.replace(data_dir / FILE_NAME)


def merged(given: StartOptions, remembered: StartOptions, environment: Mapping[str, str]) -> StartOptions:
    """Lay `given` over `remembered`. A remembered option yields to the environment, and to a configuration file that
    is named now: both are more recent."""
    in_file = _sections_of(given.config)
    if given.config is None:
        in_file = {}
    overrides: Overrides = {}
    for section, key in _OPTIONS:
        mine = given.overrides.get(section, {})
        theirs = remembered.overrides.get(section, {})
        if key in mine:
            overrides.setdefault(section, {})[key] = mine[key]
        elif key in theirs and not _in_environment(section, key, environment) and key not in in_file.get(section, {}):
            overrides.setdefault(section, {})[key] = theirs[key]
    if "kind" in given.overrides.get("engine", {}) and given.overrides["engine"]["kind"] != EngineKind.SCRIPTED:
        overrides["engine"].pop("script", None)  # it belongs to the stored engine, which was the scripted one
    return StartOptions(
        config=given.config or remembered.config,
        overrides=overrides,
        trainer=remembered.trainer if given.trainer is None else given.trainer,
        nproc=remembered.nproc if given.nproc is None else given.nproc,
        seed=remembered.seed if given.seed is None else given.seed,
    )


def worth_remembering(options: StartOptions, environment: Mapping[str, str]) -> StartOptions:
    """Return the options together with those of the environment, which the next shell may lack, and with absolute
    paths."""
    overrides: Overrides = {}
    for section, key in _OPTIONS:
        value = options.overrides.get(section, {}).get(key, _in_environment(section, key, environment))
        if value is not None:
            overrides.setdefault(section, {})[key] = _absolute(key, value)
    return replace(options, overrides=overrides)


def described(options: StartOptions) -> str:
    """Return the options as a user would type them."""
    words = [] if options.config is None else ["--config", str(options.config)]
    for (section, key), name in _OPTIONS.items():
        if (value := options.overrides.get(section, {}).get(key)) is not None:
            words += [name, str(value)]
    words += {None: [], True: ["--trainer"], False: ["--no-trainer"]}[options.trainer]
    for name, number in (("--nproc", options.nproc), ("--seed", options.seed)):
        words += [] if number is None else [name, str(number)]
    return " ".join(words)


def _in_environment(section: str, key: str, environment: Mapping[str, str]) -> str | None:
    return environment.get(f"BASE_RL_{section}__{key}".upper())


def _sections_of(config: Path | None) -> dict[str, dict[str, Any]]:
    """Return the sections of a file. One that cannot be read is reported by `load_settings`, which reads it next."""
    if config is None:
        return {}
    try:
        values = tomllib.loads(config.read_text())
    except (OSError, ValueError):
        return {}
    return {name: section for name, section in values.items() if isinstance(section, dict)}


def _absolute(key: str, value: Any) -> Any:
    """Return the absolute path of a model's directory or of a script: the next start may have another working
    directory."""
    if key not in ("model", "script"):
        return value
    path = Path(str(value)).expanduser()
    return str(path.resolve()) if path.exists() else value
