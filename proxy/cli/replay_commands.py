"""`base-rl replay`: makes a past training step again, in a process of the trainer's."""

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
    """Make a past training step again from the store, and compare the weights with those that were committed.

    The batch, with turns and rewards as they were handed out, the configuration and the seed come from the store, the
    parent's weights from the disk; where its optimiser state was not kept, the steps before are made again first. It
    runs beside a base-rl that is up and changes nothing. A step made with functions of your own (`algorithm.loss` and
    so on) needs the configuration that names their files, by --config. The exit status is 3 where the step cannot be
    replayed.
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
