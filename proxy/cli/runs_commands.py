"""`base-rl runs …`: create, show, change, pause, archive, clone and delete runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from proxy.cli.asking import Place, ask_and_show
from proxy.cli.console import DEFAULT_DATA_DIR, ApiKey, AsJson, DataDir, Refused, Url, errors, out

if TYPE_CHECKING:  # loaded only when a command runs: httpx takes long to import
    from proxy.cli.operations import Operations

runs_app = typer.Typer(no_args_is_help=True, help="The policies being trained.")

RunName = Annotated[str, typer.Argument(help="The run's name.")]
Assignments = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="A key of [run], such as `max_new_tokens=512` or `limits.max_waiting=64`."
    ),
]


@runs_app.command("list")
def runs_list(
    data_dir: DataDir = DEFAULT_DATA_DIR, url: Url = None, api_key: ApiKey = None, as_json: AsJson = False
) -> None:
    """List runs with their versions, sessions and rewards."""
    ask_and_show((data_dir, url, api_key), lambda base_rl: base_rl.runs(), _print_table, as_json=as_json)


@runs_app.command("show")
def runs_show(
    run: RunName,
    data_dir: DataDir = DEFAULT_DATA_DIR,
    url: Url = None,
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """Show one run with all its settings."""
    ask_and_show((data_dir, url, api_key), lambda base_rl: base_rl.run(run), _print_run, as_json=as_json)


@runs_app.command("create")
def runs_create(
    run: Annotated[str, typer.Argument(help="Name of the new run, which agents send as `model`.")],
    model: Annotated[
        str | None, typer.Option(help="Base model: a directory on the proxy's machine, or a Hugging Face id.")
    ] = None,
    begin_from: Annotated[
        str | None,
        typer.Option("--from", metavar="RUN@VERSION", help="Begin with the weights of this version of another run."),
    ] = None,
    project: Annotated[str | None, typer.Option(help="The project of the run; default: `default`.")] = None,
    assignments: Assignments = None,
    data_dir: DataDir = DEFAULT_DATA_DIR,
    url: Url = None,
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """Create a run on a base model, or from another run's version.

    With `--from other@12`, version 0 of the new run has the weights of that version; its base model and its kind of
    weights are those of the other run. The proxy loads the model's tokenizer and chat template first, so that a run
    that could not answer calls is refused here. Keys that --set does not give have their defaults. Then give the
    run's agents a key of their own: `base-rl keys create --kind run --run NAME`.
    """
    if model is None and begin_from is None:
        raise typer.BadParameter("give a base model, or --from RUN@VERSION", param_hint="--model")
    body: dict[str, Any] = {"name": run}
    if model is not None:
        # The proxy may run in another directory, so a directory is sent by its absolute path.
        directory = Path(model).expanduser()
        body["model"] = str(directory.resolve()) if directory.is_dir() else model
    if begin_from is not None:
        body["from"] = begin_from
    if project is not None:
        body["project"] = project
    ask_and_show(
        (data_dir, url, api_key),
        lambda base_rl: base_rl.create_run({**body, "settings": _settings(assignments)}),
        _print_new,
        as_json=as_json,
    )


@runs_app.command("clone")
def runs_clone(
    run: Annotated[str, typer.Argument(help="The run to copy the base model and the settings of.")],
    name: Annotated[str, typer.Argument(help="Name of the new run.")],
    assignments: Assignments = None,
    data_dir: DataDir = DEFAULT_DATA_DIR,
    url: Url = None,
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """Create a run with the base model and the settings of another one.

    It begins at version 0, the base model, without sessions and keys. --set changes keys of the copy.
    """
    ask_and_show(
        (data_dir, url, api_key),
        lambda base_rl: base_rl.clone_run(run, {"name": name, "settings": _settings(assignments)}),
        _print_new,
        as_json=as_json,
    )


@runs_app.command("set")
def runs_set(
    run: RunName,
    assignments: Annotated[
        list[str],
        typer.Argument(metavar="KEY=VALUE…", help="Keys of [run], as `max_new_tokens=512`; null is the default."),
    ],
    data_dir: DataDir = DEFAULT_DATA_DIR,
    url: Url = None,
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """Change settings of a run while it serves; calls see them within two seconds.

    A run that the configuration declares takes its settings from there again at the next start: change them there as
    well. Its name, its base model and its kind of weights never change.
    """
    ask_and_show(
        (data_dir, url, api_key),
        lambda base_rl: base_rl.change_run(run, {"settings": _settings(assignments)}),
        _print_run,
        as_json=as_json,
    )


@runs_app.command("pause")
def runs_pause(
    run: RunName,
    reason: Annotated[str | None, typer.Option(help="Shown among the problems of `base-rl status`.")] = None,
    data_dir: DataDir = DEFAULT_DATA_DIR,
    url: Url = None,
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """Stop handing out trajectories to trainers. Agents are served and recorded as before."""
    _switch((data_dir, url, api_key), run, "pause", "paused", reason=reason, as_json=as_json)


@runs_app.command("resume")
def runs_resume(
    run: RunName,
    data_dir: DataDir = DEFAULT_DATA_DIR,
    url: Url = None,
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """Hand out trajectories of a paused run again."""
    _switch((data_dir, url, api_key), run, "resume", "resumed", as_json=as_json)


@runs_app.command("archive")
def runs_archive(
    run: RunName,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
    data_dir: DataDir = DEFAULT_DATA_DIR,
    url: Url = None,
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """Stop serving and training a run, and keep all its data. `unarchive` brings it back.

    Its agents' calls get a 410 that says so, and its trainers wait.
    """
    if not yes:
        typer.confirm(f"{run} will answer no calls until it is unarchived. Archive it?", abort=True, err=True)
    _switch((data_dir, url, api_key), run, "archive", "archived", as_json=as_json)


@runs_app.command("unarchive")
def runs_unarchive(
    run: RunName,
    data_dir: DataDir = DEFAULT_DATA_DIR,
    url: Url = None,
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """Make an archived run active again."""
    _switch((data_dir, url, api_key), run, "unarchive", "unarchived", as_json=as_json)


@runs_app.command("delete")
def runs_delete(
    run: RunName,
    yes: Annotated[
        str | None,
        typer.Option("--yes", metavar="RUN", help="The run's name again, instead of typing it when asked."),
    ] = None,
    data_dir: DataDir = DEFAULT_DATA_DIR,
    url: Url = None,
    api_key: ApiKey = None,
) -> None:
    """Delete a run with its keys, sessions, versions and weights. This cannot be undone.

    A run with sessions or training steps must be archived first. A run from whose versions others began is refused.
    """
    if yes not in (None, run):
        raise typer.BadParameter(f"it must be the run's name again, {run}, not {yes}", param_hint="--yes")

    async def delete(base_rl: Operations) -> None:
        found = await base_rl.run(run)
        if yes is None:
            errors.print(_loss(found), soft_wrap=True)
            if typer.prompt("Type its name to delete it", err=True) != found["name"]:
                raise Refused(f"that is not {found['name']}: nothing is deleted")
        await base_rl.delete_run(found["name"])

    ask_and_show((data_dir, url, api_key), delete, lambda _: out.print(f"the run {run} is deleted"))


def _loss(run: dict[str, Any]) -> str:
    """Return what goes with a run, as one sentence."""
    return (
        f"{run['session_count']} sessions, {run['turn_count']} turns and the versions up to {run['head_version']} of"
        f" {run['name']}, with their weights and its keys, will be gone for good."
    )


def _switch(place: Place, run: str, change: str, done: str, *, as_json: bool, reason: str | None = None) -> None:
    def show(after: dict[str, Any]) -> None:
        out.print(f"the run {run} is {done}" + (f": it is {after['state']}" if after["state"] != done else ""))

    ask_and_show(place, lambda base_rl: base_rl.switch_run(run, change, reason), show, as_json=as_json)


def _settings(assignments: list[str] | None) -> dict[str, Any]:
    """Return `KEY=VALUE` assignments as one nested mapping. Raise Refused for any other text."""
    from proxy.contract.configuration import merge, nested, parse_value

    settings: dict[str, Any] = {}
    for text in assignments or ():
        key, separator, value = text.partition("=")
        if not separator or not all(key.split(".")):
            raise Refused(f"{text!r}: write KEY=VALUE, such as max_new_tokens=512")
        settings = merge(settings, nested(key.split("."), parse_value(value)))
    return settings


def _print_new(run: dict[str, Any]) -> None:
    _print_run(run)
    errors.print(f"Next: base-rl keys create --kind run --run {run['name']}", soft_wrap=True)


def _print_run(run: dict[str, Any]) -> None:
    facts = Table.grid(padding=(0, 2))
    for label, value in (
        ("run", run["name"]),
        ("id", run["id"]),
        ("state", run["state"]),
        ("base model", run["base_model"]),
        ("version", f"{run['serving_version']} serves, {run['head_version']} is the newest"),
        ("sessions", str(run["session_count"])),
        *([("begun from", run["begun_from"])] if run.get("begun_from") else []),
    ):
        facts.add_row(label, value)
    for key, value in _flat(run["settings"]):
        facts.add_row(key, json.dumps(value, ensure_ascii=False))
    out.print(facts)


def _flat(settings: dict[str, Any], path: str = "") -> list[tuple[str, Any]]:
    """Return settings as `section.key` with their values, in order."""
    found: list[tuple[str, Any]] = []
    for key, value in settings.items():
        if isinstance(value, dict) and value:
            found += _flat(value, f"{path}{key}.")
        else:
            found.append((f"{path}{key}", value))
    return found


def _print_table(runs: list[dict[str, Any]]) -> None:
    from proxy.admin.formatting import model as short_model
    from proxy.admin.formatting import percent

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
        table.add_row(
            one["name"],
            one["state"],
            str(one["head_version"]),
            str(one["serving_version"]),
            "–" if one["mean_reward"] is None else f"{one['mean_reward']:.3f}",
            str(sum(one["sessions"].values())),
            percent(one["unattributed_share"]),
            short_model(one["base_model"]),
        )
    out.print(table)
