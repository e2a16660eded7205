"""The whole configuration: read, checked, and written as the environment of another process."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field, SecretStr, ValidationError, model_validator
from pydantic_core import ErrorDetails

from proxy.contract.configuration import (
    ENVIRONMENT_PREFIX,
    UnreadableConfiguration,
    environment_values,
    merge,
    read_config_file,
)
from proxy.contract.memory import default_memory_directory
from proxy.settings import runs as run_tables
from proxy.settings.database import DatabaseSettings
from proxy.settings.engine import EngineName, EngineSettings, NamedEngineSettings
from proxy.settings.jobs import JobSettings
from proxy.settings.judges import JudgingSettings, ProviderName, ProviderSettings
from proxy.settings.outbound import OutboundSettings
from proxy.settings.ray import RaySettings
from proxy.settings.run import RunSettings
from proxy.settings.section import ConfigurationError, Section
from proxy.settings.server import BootstrapSettings, RequestSettings, ServerSettings
from proxy.settings.slurm import SlurmSettings


class Settings(Section):
    """Every setting of the proxy. `load_settings` reads them; the trainer checks its section itself."""

    server: ServerSettings = ServerSettings()
    requests: RequestSettings = RequestSettings()
    bootstrap: BootstrapSettings = BootstrapSettings()
    database: DatabaseSettings = DatabaseSettings()
    jobs: JobSettings = JobSettings()
    outbound: OutboundSettings = OutboundSettings()
    judging: JudgingSettings = JudgingSettings()
    providers: dict[ProviderName, ProviderSettings] = Field(default_factory=dict)
    """Endpoints whose models judges use, by name."""
    engine: EngineSettings = EngineSettings()
    engines: dict[EngineName, NamedEngineSettings] = Field(default_factory=dict)
    run: RunSettings = RunSettings()
    """The first run, which this proxy serves."""
    runs: dict[str, RunSettings] = Field(default_factory=dict)
    """The runs of the tables `[runs.NAME]`, each complete; the first run may be one of them."""
    slurm: SlurmSettings = SlurmSettings()
    ray: RaySettings = RaySettings()
    trainer: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _judges_have_providers(self) -> Settings:
        for run in self.declared_runs:
            for name, judge in run.judges.items():
                if judge.provider is not None and judge.provider not in self.providers:
                    raise ValueError(
                        f"the judge {name!r} of the run {run.name!r} names the provider {judge.provider!r}, which is "
                        f"not there: add [providers.{judge.provider}], with its base_url unless it is litellm's"
                    )
        return self

    @model_validator(mode="after")
    def _judges_reach_runs(self) -> Settings:
        """Raise ValueError for judges that ask runs where workers do the judging: workers have no engines."""
        if self.jobs.broker is None:
            return self
        for run in self.declared_runs:
            for name, judge in run.judges.items():
                if judge.run_model is not None:
                    raise ValueError(
                        f"the judge {name!r} of the run {run.name!r} asks a run ({judge.model}), and with "
                        "jobs.broker `base-rl worker` judges, which has no engines: leave out jobs.broker, or ask a "
                        "provider"
                    )
        return self

    @property
    def declared_runs(self) -> tuple[RunSettings, ...]:
        """All runs of the configuration, the first one first."""
        return (self.run, *(run for name, run in self.runs.items() if name != self.run.name))

    @property
    def database_url(self) -> str:
        return self.database.full_url or f"sqlite:///{self.server.data_dir.resolve() / 'base-rl.sqlite3'}"

    @property
    def exports_dir(self) -> Path:
        """The directory for exports."""
        return (self.server.exports_dir or self.server.data_dir / "exports").resolve()

    @property
    def weights_dir(self) -> Path:
        """The directory in which trainers publish: one directory per run, in it one per version."""
        return (self.server.weights_dir or self.server.data_dir / "weights").resolve()

    @property
    def weights_cache_dir(self) -> Path:
        """The directory for whole files of versions that trainers publish as differences."""
        return (self.server.weights_cache_dir or self.server.data_dir / "weights-cache").resolve()

    @property
    def weights_memory_dir(self) -> Path:
        """The directory in shared memory in which trainers on this machine publish."""
        return (self.server.weights_memory_dir or default_memory_directory()).resolve()


def load_settings(
    config_file: Path | None = None, overrides: Mapping[str, Mapping[str, Any]] | None = None
) -> Settings:
    """Read file and environment, and lay `overrides` ({section: {key: value}}, the command line's) over both.

    Raise ConfigurationError with one line per wrong key.
    """
    _refuse_unknown_sections(os.environ)
    try:
        values = merge(_file_and_environment(config_file), overrides or {})
    except UnreadableConfiguration as error:
        raise ConfigurationError(str(error)) from error
    try:
        return Settings.model_validate(run_tables.resolved(values))
    except ValidationError as error:
        details = [detail for detail in error.errors() if not run_tables.is_inherited(values, detail["loc"])]
        raise ConfigurationError(_lines(details)) from error


def _file_and_environment(config_file: Path | None) -> dict[str, Any]:
    """Return the sections of the file, with those of the environment laid over them."""
    values = read_config_file(config_file) if config_file is not None else {}
    for section in Settings.model_fields:
        if section == run_tables.TABLES:
            values[section] = run_tables.with_environment(values.get(section, {}), os.environ)
        else:
            values = merge(values, {section: given} if (given := environment_values(os.environ, section)) else {})
    return values


def opentelemetry_is_set_up() -> bool:
    """Return whether a variable of OpenTelemetry (`OTEL_…`) or of FastAPI's part in it (`FASTAPI_OTEL_…`) is set."""
    return any(name.startswith(("OTEL_", "FASTAPI_OTEL_")) for name in os.environ)


def as_environment(settings: Settings) -> dict[str, str]:
    """Return the environment that gives another process these settings, whatever its own environment and file say.

    Keys that are None are left out, and so are `bootstrap` and `trainer`.
    """
    environment: dict[str, str] = {}

    def add(name: str, section: BaseModel) -> None:
        for key, field in type(section).model_fields.items():
            value = getattr(section, key)
            path = f"{name}__{(field.alias or key).upper()}"
            if isinstance(value, BaseModel):
                add(path, value)
            elif isinstance(value, dict | tuple):
                environment[path] = json.dumps(section.model_dump(mode="json", include={key})[key])
            elif isinstance(value, SecretStr):
                environment[path] = value.get_secret_value()
            elif value is not None:
                environment[path] = str(value)

    for name in ("server", "requests", "database", "jobs", "outbound", "judging", "engine", "run"):
        add(f"{ENVIRONMENT_PREFIX}{name.upper()}", getattr(settings, name))
    for name, provider in settings.providers.items():
        add(f"{ENVIRONMENT_PREFIX}PROVIDERS__{name.upper()}", provider)
    # One variable: names of runs may have characters and capitals that a variable's name cannot have.
    # `project` is no part of a run's stored settings, so a dump leaves it out.
    tables = {
        name: run.model_dump(mode="json", by_alias=True)
        | ({"project": run.project} if run.project is not None else {})
        for name, run in settings.runs.items()
    }
    environment[f"{ENVIRONMENT_PREFIX}RUNS"] = json.dumps(tables)
    return environment


def _refuse_unknown_sections(environment: Mapping[str, str]) -> None:
    """Raise ConfigurationError for a variable of an unknown section, which would otherwise be ignored silently."""
    for name in environment:
        section, separator, _ = name.removeprefix(ENVIRONMENT_PREFIX).lower().partition("__")
        if name.startswith(ENVIRONMENT_PREFIX) and separator and section not in Settings.model_fields:
            known = ", ".join(Settings.model_fields)
            raise ConfigurationError(f"{name}: there is no section {section!r}; the sections are {known}")


def describe(error: ValidationError, *within: str) -> str:
    """Return a validation error as lines of `key: what is wrong`; `within` is the path to the validated value."""
    return _lines(error.errors(), *within)


def _lines(details: Sequence[ErrorDetails], *within: str) -> str:
    lines = []
    for detail in details:
        key = ".".join(str(part) for part in (*within, *detail["loc"]))
        message = {"extra_forbidden": "there is no such key", "model_type": f"write it as a section, [{key}]"}
        # A rule about several sections has no key.
        where = f"{key}: " if key else ""
        lines.append(f"{where}{message.get(detail['type'], detail['msg'].removeprefix('Value error, '))}")
    return "\n".join(lines)
