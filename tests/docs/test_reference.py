"""Compare the reference with the code: it documents all settings, commands, endpoints, errors and metrics, and no
others."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterator
from functools import cache
from typing import Annotated, Any, get_args, get_origin

import pytest
import typer.main
from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import to_jsonable_python

import proxy.engines.embedded.__main__
import proxy.engines.scripted.__main__
import proxy.server
import trainer.__main__
from proxy import errors
from proxy.app import create_app
from proxy.cli.commands import app as command_line
from proxy.engines.activity import EngineActivity
from proxy.metrics import Metrics
from proxy.settings import (
    EngineSettings,
    NamedEngineSettings,
    ProviderSettings,
    ServerSettings,
    Settings,
    load_settings,
)
from tests.docs.markdown import ROOT, code, rows, sections
from trainer.algorithm.parts import Algorithm
from trainer.algorithm.presets import PRESETS
from trainer.config import (
    AlgorithmSettings,
    CollectiveWeights,
    DeltaWeights,
    DiskWeights,
    SharedDirectory,
    TensorsWeights,
    TrainerSettings,
)
from trainer.fit.command import main as fit_main

NOT_SET = "–"
MACHINE_DEPENDENT = (EngineSettings, "sglang_venv")


@cache
def reference() -> str:
    return (ROOT / "docs" / "reference.md").read_text()


def section(heading: str) -> str:
    return sections(reference())[heading]


# Configuration


def configuration() -> Iterator[tuple[str, type[BaseModel]]]:
    """Return every section of the configuration by its heading in TOML."""

    def below(name: str, model: type[BaseModel]) -> Iterator[tuple[str, type[BaseModel]]]:
        yield name, model
        for key, field in model.model_fields.items():
            for part in get_args(field.annotation) or (field.annotation,):  # or None: the section may be left out
                # Of several transports the last one is documented, which has all options.
                kind = get_args(part)[0] if get_origin(part) is Annotated else part
                if isinstance(kind, type) and issubclass(kind, BaseModel):
                    table = ".NAME" if get_origin(field.annotation) is dict else ""
                    yield from below(f"{name}.{key}{table}", kind)

    for key, field in Settings.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from below(key, field.annotation)
    yield from below("engines.NAME", NamedEngineSettings)
    yield from below("providers.NAME", ProviderSettings)
    yield from below("trainer", TrainerSettings)


SECTIONS = dict(configuration())


def fields_of(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """Return the fields of a section by their names in the configuration: of one with several types, those of all."""
    models: tuple[type[BaseModel], ...] = (model,)
    if issubclass(model, SharedDirectory):
        models = (DiskWeights, DeltaWeights, TensorsWeights, CollectiveWeights)
    return {field.alias or key: field for each in models for key, field in each.model_fields.items()}


def settings_table(name: str) -> dict[str, list[str]]:
    return {code(cells[0])[0]: cells for cells in rows(section(f"`[{name}]`")) if len(cells) == 4}


def test_every_section_of_the_configuration_is_documented_and_no_other() -> None:
    documented = re.findall(r"^### `\[(.+)\]`$", reference(), re.MULTILINE)
    assert sorted(documented) == sorted(SECTIONS)


@pytest.mark.parametrize("name", SECTIONS)
def test_every_key_is_documented_and_no_other(name: str) -> None:
    assert list(settings_table(name)) == list(fields_of(SECTIONS[name]))


@pytest.mark.parametrize("name", SECTIONS)
def test_the_documented_defaults_are_the_defaults(name: str) -> None:
    model = SECTIONS[name]
    for key, cells in settings_table(name).items():
        if fields_of(model)[key].is_required():
            assert cells[2] == "required", key
            continue
        default = fields_of(model)[key].get_default(call_default_factory=True)
        if issubclass(model, SharedDirectory) and key == "type":
            assert value(cells[2]) == "disk"
        elif isinstance(default, BaseModel):
            assert cells[2] == "", f"{key} is a section"
        elif default is None:
            assert cells[2] == NOT_SET, key
        elif (model, key) != MACHINE_DEPENDENT:
            assert value(cells[2]) == to_jsonable_python(default, by_alias=True), key


def test_the_documented_preset_parts_are_the_presets() -> None:
    table = {code(cells[0])[0]: cells[1:] for cells in rows(section("`[trainer.algorithm]`")) if len(cells) != 4}
    names = list(PRESETS)
    own_sections = ("reward", "filters")
    parts = [part for part in Algorithm.__dataclass_fields__ if part not in own_sections]
    assert list(table) == parts
    assert [part for part in AlgorithmSettings.model_fields if part not in ("preset", *own_sections)] == parts
    for part, cells in table.items():
        for name, cell in zip(names, cells, strict=True):
            actual = getattr(PRESETS[name], part)
            assert (cell == NOT_SET) if actual is None else (value(cell) == actual), f"{name}.{part}"


def test_every_preset_is_documented_with_its_formula_and_no_other() -> None:
    assert [code(cells[0])[0] for cells in rows(section("What a preset computes"))] == list(PRESETS)


def value(cell: str) -> Any:
    (text,) = code(cell)
    return tomllib.loads(f"it = {text}")["it"]


def test_the_examples_of_the_environment_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BASE_RL_RUN__REWARD_WEIGHTS", '{"style": 0.1}')
    monkeypatch.setenv("BASE_RL_SERVER__PORT", "9000")
    settings = load_settings(None)
    assert settings.run.reward_weights == {"style": 0.1}
    assert settings.server == ServerSettings(port=9000)
    for example in ("BASE_RL_SERVER__PORT=9000", "BASE_RL_RUN__REWARD_WEIGHTS='{\"style\": 0.1}'"):
        assert example in reference()


# Command line


def commands() -> dict[str, set[str]]:
    """Return the options of every `base-rl` command."""
    found: dict[str, set[str]] = {}

    def walk(command: Any, path: str) -> None:
        for name, below in getattr(command, "commands", {}).items():
            walk(below, f"{path} {name}")
        if not hasattr(command, "commands"):
            found[path] = {option for parameter in command.params for option in options_of(parameter)}

    walk(typer.main.get_command(command_line), "base-rl")
    return found


def options_of(parameter: Any) -> list[str]:
    return [*parameter.opts, *parameter.secondary_opts]


COMMANDS = commands()

PROGRAMS: dict[str, Callable[[list[str]], object]] = {
    "python -m proxy": proxy.server.main,
    "python -m trainer": trainer.__main__.main,
    "python -m trainer replay": lambda arguments: trainer.__main__.main(["replay", *arguments]),
    "python -m trainer plan": lambda arguments: trainer.__main__.main(["plan", *arguments]),
    "python -m trainer presets": lambda arguments: trainer.__main__.main(["presets", *arguments]),
    "python -m trainer fit sft": lambda arguments: fit_main(["sft", *arguments]),
    "python -m trainer fit dpo": lambda arguments: fit_main(["dpo", *arguments]),
    "python -m trainer fit kto": lambda arguments: fit_main(["kto", *arguments]),
    "python -m trainer fit reward-model": lambda arguments: trainer.__main__.main(
        ["fit", "reward-model", *arguments]
    ),
    "python -m proxy.engines.embedded": proxy.engines.embedded.__main__.parse,
    "python -m proxy.engines.scripted": proxy.engines.scripted.__main__.parse,
}


def documented_options(heading: str) -> set[str]:
    return {option for cells in rows(section(heading)) for option in code(cells[0])}


def test_every_command_is_documented_and_no_other() -> None:
    documented = re.findall(r"^### (base-rl .+|python -m .+)$", reference(), re.MULTILINE)
    assert sorted(documented) == sorted([*COMMANDS, *PROGRAMS])


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_of_a_command_is_documented_and_no_other(command: str) -> None:
    assert documented_options(command) == COMMANDS[command]


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_option_of_a_program_is_documented_and_no_other(
    program: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        PROGRAMS[program](["--help"])
    usage = capsys.readouterr().out
    options = set(re.findall(r"^ {2,}(?:-\w, )?(--[a-z-]+)", usage, re.MULTILINE))
    assert documented_options(program) == options - {"--help"}


# HTTP API


def routes(app: FastAPI) -> set[str]:
    """Return `METHOD /path` for every endpoint of the application, without the names of path parameters."""
    found: set[str] = set()
    entries: list[Any] = list(app.routes)
    for entry in entries:
        included = getattr(entry, "effective_route_contexts", None)
        for route in [entry] if included is None else included():
            found |= {f"{method} {without_names(route.path)}" for method in route.methods - {"HEAD"}}
    return found


def without_names(path: str) -> str:
    return re.sub(r"\{[^}]*\}", "{}", path)


def test_every_route_is_documented_and_no_other() -> None:
    app = create_app(load_settings(None, {"engine": {"url": "http://127.0.0.1:1"}}))
    documented = re.findall(r"`((?:GET|POST|PUT|PATCH|DELETE) /[^`]*)`", reference())
    assert {without_names(route) for route in documented} == routes(app)


# Errors and metrics


def error_classes(of: type[errors.BaseRlError] = errors.BaseRlError) -> Iterator[type[errors.BaseRlError]]:
    yield of
    for below in of.__subclasses__():
        yield from error_classes(below)


def test_every_error_is_documented_and_no_other() -> None:
    documented = {
        (int(cells[0]), code(cells[1])[0], code(cells[2])[0] if code(cells[2]) else None)
        for cells in rows(section("Errors"))
    }
    ours = {(each.status, each.type, each.code) for each in error_classes() if each.__module__ == errors.__name__}
    from_the_framework = {(405, "invalid_request_error", "method_not_allowed")}
    assert documented == ours | from_the_framework


def test_every_metric_is_documented_with_its_labels_and_no_other() -> None:
    documented = {code(cells[0])[0]: labels(cells[2]) for cells in rows(section("Metrics"))}
    registered: dict[str, list[str]] = {}
    for collector in Metrics(EngineActivity()).registry._collector_to_names:
        for family in collector.describe():  # type: ignore[attr-defined]
            name = f"{family.name}_total" if family.type == "counter" else family.name
            registered[name] = list(collector._labelnames)  # type: ignore[attr-defined]
    assert documented == registered


def labels(cell: str) -> list[str]:
    """Return the names of the labels, without their values in brackets."""
    return code(re.sub(r"\([^)]*\)", "", cell))
