"""`base-rl plan`: the memory that training a model needs, in a process of the trainer, which computes it."""

from __future__ import annotations

import typer

from proxy.cli.console import finish


def plan(context: typer.Context) -> None:
    """Print the memory that training a model needs on each rank, and what would fit if it does not.

    Nothing is loaded or downloaded but the model's config.json. The exit status is 1 if it does not fit.
    """
    from proxy.cli.train_commands import supervised
    from proxy.cli.trainer_process import trainer_command

    finish(lambda: supervised(trainer_command(1, ["plan", *context.args]), {}))
