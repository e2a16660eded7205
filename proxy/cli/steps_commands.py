"""`base-rl steps …`: list and explain the training steps of a run."""

from __future__ import annotations

import asyncio
import json
from typing import Annotated, Any

import typer

from proxy.cli.console import DEFAULT_DATA_DIR, ApiKey, AsJson, DataDir, Url, finish, out, where

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
    from proxy.cli.operations import Operations
    from proxy.cli.step_drawing import steps_table

    async def ask() -> list[dict[str, Any]]:
        async with Operations(*where(data_dir, url, api_key)) as operations:
            return await operations.steps(run, limit)

    def show() -> int:
        steps = asyncio.run(ask())
        if as_json:
            out.print_json(json.dumps(steps))
        else:
            out.print(steps_table(steps))
        return 0

    finish(show)


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
    from proxy.cli.operations import Operations
    from proxy.cli.step_drawing import draw_step

    async def ask() -> dict[str, Any]:
        async with Operations(*where(data_dir, url, api_key)) as operations:
            return await operations.step(run, step)

    def show() -> int:
        found = asyncio.run(ask())
        if as_json:
            out.print_json(json.dumps(found))
        else:
            for part in draw_step(found):
                out.print(part)
        return 0

    finish(show)
