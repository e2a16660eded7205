"""`base-rl runs …`: list runs, and delete an empty one."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.table import Table

from proxy.cli.asking import ask_and_show
from proxy.cli.console import DEFAULT_DATA_DIR, ApiKey, AsJson, DataDir, Url, out

runs_app = typer.Typer(no_args_is_help=True, help="The policies being trained.")


@runs_app.command("list")
def runs_list(
    data_dir: DataDir = DEFAULT_DATA_DIR, url: Url = None, api_key: ApiKey = None, as_json: AsJson = False
) -> None:
    """List runs with their versions, sessions and rewards."""
    from proxy.admin.formatting import model as short_model
    from proxy.admin.formatting import percent

    def show(runs: list[dict[str, Any]]) -> None:
        table = Table(box=None, pad_edge=False, header_style="bold")
        for heading in (
            "run",
            "state",
            "head",
            "serving",
            "reward (last 128)",
            "sessions",
            "not attributed",
            "base model",
        ):
            table.add_column(heading)
        for one in runs:
            reward = "–" if one["mean_reward"] is None else f"{one['mean_reward']:.3f}"
            sessions = str(sum(one["sessions"].values()))
            table.add_row(
                one["name"],
                one["state"],
                str(one["head_version"]),
                str(one["serving_version"]),
                reward,
                sessions,
                percent(one["unattributed_share"]),
                short_model(one["base_model"]),
            )
        out.print(table)

    ask_and_show((data_dir, url, api_key), lambda base_rl: base_rl.runs(), show, as_json=as_json)


@runs_app.command("delete")
def runs_delete(
    run: Annotated[str, typer.Argument(help="The run's name.")],
    data_dir: DataDir = DEFAULT_DATA_DIR,
    url: Url = None,
    api_key: ApiKey = None,
) -> None:
    """Delete a run without sessions and training steps, with its keys.

    A run that has any is refused, and so is the run that is served: recorded data is never lost.
    """
    ask_and_show(
        (data_dir, url, api_key),
        lambda base_rl: base_rl.delete_run(run),
        lambda _: out.print(f"the run {run} is deleted"),
    )
