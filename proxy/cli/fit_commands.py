"""`base-rl fit`: fit the newest weights to chosen sessions, preferences or files, in a process of the trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from proxy.cli.console import Config, finish

AS_THEY_ARE = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}
"""Settings of a command that passes unknown options, and `--help`, to the trainer, which documents its own."""
_ASKS_FOR_HELP = {"--help", "-h"}


def fit(
    context: typer.Context,
    config: Config = None,
    run: Annotated[str | None, typer.Option(help="The run; default: [trainer] run, or [run] name.")] = None,
    proxy: Annotated[
        str | None, typer.Option(metavar="URL", help="Address of the proxy; default: the one of --data-dir.")
    ] = None,
    assignments: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Set any key of [trainer].")
    ] = None,
    data_dir: Annotated[
        Path | None, typer.Option(help="Data directory of the base-rl with the run; default: [server] data_dir.")
    ] = None,
) -> None:
    """Fit a run's newest weights to chosen sessions, to preferences, or to rows of files.

    Choose a method: `base-rl fit sft|dpo|kto|reward-model`.

    Each method has its own `--help`.
    """
    options = ["--config", str(config.resolve())] if config is not None else []
    options += ["--run", run] if run is not None else []
    given = [f"proxy_url={proxy}"] if proxy is not None else []
    for assignment in [*(assignments or []), *given]:
        options += ["--set", assignment]
    finish(lambda: _fit(config, data_dir, context.args, options))


def _fit(config: Path | None, data_dir: Path | None, words: list[str], options: list[str]) -> int:
    """Run the fit and return its status. `options` are those that the trainer takes for training too."""
    from proxy.cli.train_commands import connected, supervised
    from proxy.cli.trainer_process import trainer_command

    command = trainer_command(1, ["fit", *words])
    if not words or _ASKS_FOR_HELP.intersection(words):
        return supervised(command, {})
    environment, _ = connected(config, data_dir, options)
    return supervised((*command, *options), environment)
