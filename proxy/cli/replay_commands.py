"""`base-rl replay`: repeat a past training step in a process of the trainer."""

from __future__ import annotations

import os
import subprocess
from typing import Annotated

import typer

from proxy.cli.console import DEFAULT_DATA_DIR, ApiKey, AsJson, Config, DataDir, Url, finish, where


def replay(
    run: Annotated[str, typer.Argument(help="The run's name.")],
    step: Annotated[int, typer.Argument(help="The version that the step made.", min=1)],
    verify: Annotated[
        bool, typer.Option("--verify", help="Exit status 1 unless the weights come out bit for bit.")
    ] = False,
    config: Config = None,
    data_dir: DataDir = DEFAULT_DATA_DIR,
    url: Url = None,
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """Repeat a past training step, and compare its weights with those that were committed.

    Batch, rewards, configuration and seed are those recorded in the store; the parent's weights come from the disk.
    If the parent's optimiser state was deleted, the steps before it are repeated first. The command runs beside a
    base-rl that is up, and changes nothing. A step with functions of your own (`algorithm.loss` and so on) needs the
    configuration that names their files: give it with --config. The exit status is 3 if the step cannot be repeated.
    """

    from proxy.cli.trainer_process import trainer_command

    def run_it() -> int:
        address, key = where(data_dir, url, api_key)
        arguments = ["replay", run, str(step), "--proxy", address]
        arguments += [option for option, given in (("--verify", verify), ("--json", as_json)) if given]
        arguments += ["--config", str(config.resolve())] if config is not None else []
        environment = {**os.environ, "BASE_RL_TRAINER__API_KEY": key}
        return subprocess.run(trainer_command(1, arguments), env=environment, check=False).returncode

    finish(run_it)
