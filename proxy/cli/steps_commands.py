"""`base-rl steps …`: list and explain the training steps of a run."""

from __future__ import annotations

from typing import Annotated

import typer

from proxy.cli.asking import ask_and_show
from proxy.cli.console import DEFAULT_DATA_DIR, ApiKey, AsJson, DataDir, Url, out

steps_app = typer.Typer(no_args_is_help=True, help="Training steps.")

Run = Annotated[str, typer.Argument(help="The run's name.")]


@steps_app.command("list")
def steps_list(
    run: Run,
    limit: Annotated[int, typer.Option(help="Most entries to list.", min=1, max=200)] = 20,
    data_dir: DataDir = DEFAULT_DATA_DIR,
    url: Url = None,
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """List versions and the steps that made them, newest first."""
    from proxy.cli.step_drawing import steps_table

    ask_and_show(
        (data_dir, url, api_key),
        lambda base_rl: base_rl.steps(run, limit),
        lambda steps: out.print(steps_table(steps)),
        as_json=as_json,
    )


@steps_app.command("show")
def steps_show(
    run: Run,
    step: Annotated[int, typer.Argument(help="The version that the step made.", min=0)],
    data_dir: DataDir = DEFAULT_DATA_DIR,
    url: Url = None,
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """Explain a step: its batch by group, the rewards then and now, advantages, ratios, skipped sessions with
    reasons, gradient, loss and times."""
    from proxy.cli.step_drawing import draw_step

    ask_and_show(
        (data_dir, url, api_key),
        lambda base_rl: base_rl.step(run, step),
        lambda found: out.print(*draw_step(found), sep="\n"),
        as_json=as_json,
    )
