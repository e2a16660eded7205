"""`base-rl projects …`: list, create, archive and delete projects, and move runs to them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from proxy.cli.asking import Place, ask_and_show
from proxy.cli.console import DEFAULT_DATA_DIR, ApiKey, AsJson, DataDir, Url, out
from proxy.cli.limits_commands import budget_text

if TYPE_CHECKING:
    from proxy.cli.operations import Operations

projects_app = typer.Typer(no_args_is_help=True, help="Groups of runs with keys and limits of their own.")

ProjectName = Annotated[str, typer.Argument(help="The project's name.")]


@projects_app.command("list")
def projects_list(
    data_dir: DataDir = DEFAULT_DATA_DIR, url: Url = None, api_key: ApiKey = None, as_json: AsJson = False
) -> None:
    """List projects, with their runs and the use of their budgets."""

    async def ask(base_rl: Operations) -> list[dict[str, Any]]:
        budgets = {one["id"]: one["budgets"] for one in await base_rl.limits() if one["scope"] == "project"}
        return [{**one, "budgets": budgets.get(one["id"], [])} for one in await base_rl.projects()]

    ask_and_show((data_dir, url, api_key), ask, lambda found: out.print(_table(found)), as_json=as_json)


@projects_app.command("create")
def projects_create(
    project: Annotated[str, typer.Argument(help="Name of the new project.")],
    data_dir: DataDir = DEFAULT_DATA_DIR,
    url: Url = None,
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """Create a project. Give its people a key: `base-rl keys create --kind project --project NAME`."""
    ask_and_show(
        (data_dir, url, api_key),
        lambda base_rl: base_rl.create_project({"name": project}),
        lambda made: out.print(f"{made['name']} is a new project ({made['id']})"),
        as_json=as_json,
    )


@projects_app.command("move")
def projects_move(
    run: Annotated[str, typer.Argument(help="The run to move, with its keys.")],
    project: ProjectName,
    data_dir: DataDir = DEFAULT_DATA_DIR,
    url: Url = None,
    api_key: ApiKey = None,
) -> None:
    """Move a run to a project: the keys of that project may use it, those of the former one no longer."""
    ask_and_show(
        (data_dir, url, api_key),
        lambda base_rl: base_rl.change_run(run, {"project": project}),
        lambda _: out.print(f"{run} is in {project}"),
    )


@projects_app.command("archive")
def projects_archive(
    project: ProjectName, data_dir: DataDir = DEFAULT_DATA_DIR, url: Url = None, api_key: ApiKey = None
) -> None:
    """Archive a project whose runs are all archived. It takes no runs until it is unarchived."""
    _set_archived(project, (data_dir, url, api_key), archived=True)


@projects_app.command("unarchive")
def projects_unarchive(
    project: ProjectName, data_dir: DataDir = DEFAULT_DATA_DIR, url: Url = None, api_key: ApiKey = None
) -> None:
    """Let an archived project take runs again."""
    _set_archived(project, (data_dir, url, api_key), archived=False)


@projects_app.command("delete")
def projects_delete(
    project: ProjectName,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for the project's name.")] = False,
    data_dir: DataDir = DEFAULT_DATA_DIR,
    url: Url = None,
    api_key: ApiKey = None,
) -> None:
    """Delete a project without runs, with its keys and webhooks, for good. It asks for the project's name."""
    if not yes and typer.prompt(f"type {project} to delete it with its keys and webhooks") != project:
        raise typer.BadParameter("another name was typed: nothing was deleted")
    ask_and_show(
        (data_dir, url, api_key),
        lambda base_rl: base_rl.delete_project(project),
        lambda _: out.print(f"{project} is deleted"),
    )


def _set_archived(project: str, place: Place, *, archived: bool) -> None:
    ask_and_show(
        place,
        lambda base_rl: base_rl.change_project(project, {"archived": archived}),
        lambda _: out.print(f"{project} is {'archived' if archived else 'active'}"),
    )


def _table(found: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("project", "runs", "tokens today", "tokens this month", "state"):
        table.add_column(heading)
    for one in found:
        table.add_row(
            one["name"],
            str(one["runs"]),
            budget_text(one["budgets"], "day"),
            budget_text(one["budgets"], "month"),
            "active" if one["archived_at"] is None else "archived",
        )
    return table
