"""`base-rl up`: engine, proxy and trainer for the user's model and agent, until Ctrl-C."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.rule import Rule
from rich.syntax import Syntax
from rich.text import Text
from sqlalchemy import make_url

from proxy.cli.extras import require_extras
from proxy.cli.models import resolve_model
from proxy.cli.remembered import (
    FILE_NAME,
    StartOptions,
    described,
    merged,
    read_remembered,
    remember,
    worth_remembering,
)
from proxy.cli.signals import end_on_signals
from proxy.cli.stack import Stack, local_url, running_stack, trainer_environment, wait_until_ready
from proxy.cli.stored_runs import chosen_run, stored_runs
from proxy.cli.trainer_process import resolved_by_trainer, runs_of
from proxy.engines.scripted.script import BUILT_IN, MODEL, read_script
from proxy.settings import ConfigurationError, EngineKind, RunSettings, ServerSettings, Settings, load_settings
from proxy.settings.urls import without_passwords
from proxy.tokens.formats import check_tool_parser

_SCRIPTED_DATA_DIR = "scripted"


@dataclass(frozen=True, kw_only=True)
class UpOptions:
    """`overrides` are the command line's, by section. `trainer` None: start one unless the engine is scripted."""

    config: Path | None
    overrides: dict[str, dict[str, Any]]
    trainer: bool | None
    seed: int | None
    dry_run: bool
    nproc: int | None = None


async def run_up(options: UpOptions, out: Console) -> int:
    """Start the parts, print how an agent reaches them, and wait for Ctrl-C or SIGTERM."""
    data_dir = _data_dir(options)
    options, again = _as_last_time(options, data_dir)
    if again and not options.dry_run:
        out.print(f"as last time ({data_dir / FILE_NAME}): {again}", style="dim", soft_wrap=True)
    settings = load_settings(options.config, options.overrides)
    for declared in settings.declared_runs:
        check_tool_parser(declared.tool_parser)
    scripted = settings.engine.kind == EngineKind.SCRIPTED
    if scripted:
        settings = _for_a_script(settings, options)
    with_trainer = not scripted and options.trainer is not False
    # Before the model: it may be a download of gigabytes.
    require_extras(
        *(["embedded"] if settings.engine.kind == EngineKind.EMBEDDED else []), *(["train"] if with_trainer else [])
    )
    run = chosen_run(settings, await asyncio.to_thread(stored_runs, settings), named=_names_the_run(options))
    settings = _with_models(
        _with_run(settings, run), lambda each: str(resolve_model(each.model, weights=not scripted))
    )
    trainer = _trainer_settings(settings, options) if with_trainer else None
    if options.dry_run:
        resolved = settings.model_dump(mode="json", by_alias=True, exclude={"bootstrap", "trainer"})
        resolved["database"]["url"] = make_url(settings.database_url).render_as_string()  # parsed as the driver does
        shown = resolved if trainer is None else {**resolved, "trainer": trainer}
        out.print_json(json.dumps(without_passwords(shown)))
        return 0
    end_on_signals()

    def listener(part: str, what: str) -> None:
        out.print(Text.assemble((f"{part:<8}", "dim"), f" {what}"))

    async with running_stack(
        settings,
        config_file=options.config,
        with_trainer=with_trainer,
        nproc=1 if trainer is None else trainer["nproc"] or 1,
        tells_metrics=trainer is not None and any(run["metrics"]["sinks"] for run in runs_of(trainer)),
        seed=options.seed,
        listener=listener,
    ) as stack:
        with out.status("loading the model …"):
            await wait_until_ready(stack)
        # Stored only once the parts are ready: a wrong option must not be used again by the next start.
        remember(settings.server.data_dir, worth_remembering(_start_options(options), os.environ))
        out.print(_welcome(stack, settings), soft_wrap=True)
        try:
            await stack.supervisor.wait_for_failure()
        except asyncio.CancelledError:
            out.print(f"ending: {'trainer, ' if with_trainer else ''}proxy, engine … (Ctrl-C again: at once)")
            raise
    return 0


def _data_dir(options: UpOptions) -> Path:
    """Return the data directory, without the options that are stored in it."""
    settings = load_settings(options.config, options.overrides)
    directory = settings.server.data_dir
    if settings.engine.kind == EngineKind.SCRIPTED and directory == ServerSettings().data_dir:
        return directory / _SCRIPTED_DATA_DIR
    return directory


def _as_last_time(options: UpOptions, data_dir: Path) -> tuple[UpOptions, str]:
    """Return the options with those of the last start below them, and the reused ones as a text."""
    remembered = read_remembered(data_dir)
    if remembered is None:
        return options, ""
    given = _start_options(options)
    both = merged(given, remembered, os.environ)
    overrides = {**both.overrides, "server": {**both.overrides.get("server", {}), "data_dir": data_dir}}
    reused = described(_without(both, given))
    return replace(
        options,
        config=both.config,
        overrides=overrides,
        trainer=both.trainer,
        nproc=both.nproc,
        seed=both.seed,
    ), reused


def _start_options(options: UpOptions) -> StartOptions:
    return StartOptions(
        config=options.config,
        overrides=options.overrides,
        trainer=options.trainer,
        nproc=options.nproc,
        seed=options.seed,
    )


def _without(options: StartOptions, given: StartOptions) -> StartOptions:
    """Return the options that were not given in this start."""
    return StartOptions(
        config=options.config if given.config is None else None,
        overrides={
            section: {key: value for key, value in keys.items() if key not in given.overrides.get(section, {})}
            for section, keys in options.overrides.items()
        },
        trainer=options.trainer if given.trainer is None else None,
        nproc=options.nproc if given.nproc is None else None,
        seed=options.seed if given.seed is None else None,
    )


def _names_the_run(options: UpOptions) -> bool:
    """Return whether command line, environment or file name the run."""
    named = load_settings(options.config).run.model_fields_set
    return "name" in named or "name" in options.overrides.get("run", {})


def with_model(settings: Settings, model: str) -> Settings:
    """Return the settings with the first run's model replaced."""
    return _with_run(settings, settings.run.model_copy(update={"model": model}))


def _with_run(settings: Settings, run: RunSettings) -> Settings:
    """Return the settings with another first run, also in its table if it has one."""
    tables = settings.runs | ({run.name: run} if run.name in settings.runs else {})
    return settings.model_copy(update={"run": run, "runs": tables})


def _with_models(settings: Settings, model_of: Callable[[RunSettings], str]) -> Settings:
    """Return the settings with the base model of every declared run replaced by what `model_of` returns for it."""
    runs = {run.name: run.model_copy(update={"model": model_of(run)}) for run in settings.declared_runs}
    tables = {name: runs[name] for name in settings.runs}
    return settings.model_copy(update={"run": runs[settings.run.name], "runs": tables})


def _for_a_script(settings: Settings, options: UpOptions) -> Settings:
    """Return the settings with a tokeniser and a data directory for the scripted engine, after checking its script.

    Raises ConfigurationError.
    """
    if options.trainer:
        raise ConfigurationError("--trainer: a scripted engine has no weights that could be trained")
    if options.nproc is not None:
        raise ConfigurationError("--nproc: with a scripted engine there is no trainer; leave it out")
    if options.seed is not None:
        raise ConfigurationError("--seed: a scripted engine draws nothing and there is no trainer; leave it out")
    read_script(settings.engine.script or BUILT_IN)
    server = settings.server
    if server.data_dir == ServerSettings().data_dir:
        server = server.model_copy(update={"data_dir": server.data_dir / _SCRIPTED_DATA_DIR})
    settings = settings.model_copy(update={"server": server})
    return _with_models(settings, lambda each: each.model or str(MODEL))


def _trainer_settings(settings: Settings, options: UpOptions) -> dict[str, Any]:
    """Return the configuration as the trainer resolves it, without the key, before any part starts.

    Raises ConfigurationError.
    """
    config = ["--config", str(options.config)] if options.config is not None else []
    environment = trainer_environment(settings, url=local_url(settings), seed=options.seed)
    if options.nproc is not None:
        environment["BASE_RL_TRAINER__NPROC"] = str(options.nproc)
    resolved = resolved_by_trainer(config, environment)
    for run in runs_of(resolved):
        del run["api_key"]
    return resolved


def _welcome(stack: Stack, settings: Settings) -> Group:
    """Return the lines to copy, without a frame and not wrapped at the window's edge."""
    name = settings.run.name
    code = (
        f"export OPENAI_BASE_URL={stack.base_url}\n"
        f"export OPENAI_API_KEY={stack.keys.run_key}\n"
        f"# your agent as ever, with model={json.dumps(name)}; each answer names its session in x-base-rl-session.\n"
        "# Then one number per session:\n"
        'curl "$OPENAI_BASE_URL/feedback" -H "Authorization: Bearer $OPENAI_API_KEY" \\\n'
        """  -H 'Content-Type: application/json' -d '{"session_id": "…", "reward": 1}'"""
    )
    page = Text.assemble("admin page  ", (stack.admin_url, "cyan"), f"\nits key     {stack.keys.admin_key}")
    scripted = settings.engine.kind == EngineKind.SCRIPTED
    return Group(
        Rule(f"{name} is up", align="left"),
        Syntax(code, "bash", background_color="default").highlight(code),
        page,
        *([_about_the_script(settings)] if scripted else []),
        Rule(f"Ctrl-C ends it; what it has {'recorded' if scripted else 'learnt'} stays", align="left"),
    )


def _about_the_script(settings: Settings) -> Text:
    script = settings.engine.script
    lines = [
        "",
        "No model runs: the scripted engine answers by rules, and there is no trainer, as nothing can learn.",
    ]
    if script is None:
        lines += [
            "It repeats the last message. For other answers, copy its script, change it, and name it:",
            f"  cp {BUILT_IN} script.toml",
            "  base-rl up --engine scripted --script script.toml",
        ]
    else:
        lines += [f"Its rules are in {script}; a changed file is read at the next start."]
    lines += [f"For `base-rl status` and `runs list`: --data-dir {settings.server.data_dir}"]
    return Text("\n".join(lines))
