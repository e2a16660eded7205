"""`base-rl keys …`: list, create, rotate and revoke API keys."""

from __future__ import annotations

import json
import re
import time
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from proxy.cli.asking import ask_and_show
from proxy.cli.console import DEFAULT_DATA_DIR, ApiKey, AsJson, DataDir, Url, errors, out
from proxy.cli.limits_commands import limits_of, merged

if TYPE_CHECKING:
    from proxy.cli.operations import Operations

keys_app = typer.Typer(no_args_is_help=True, help="API keys. A key's text is shown once, when it is made.")

KeyArgument = Annotated[str, typer.Argument(help="The key's id, as `keys list` shows it.")]


class Kind(StrEnum):
    """Kinds of keys that a person creates."""

    ADMIN = "admin"
    PROJECT = "project"
    RUN = "run"
    TRAINER = "trainer"
    VIEWER = "viewer"
    REVIEWER = "reviewer"


class ListedKind(StrEnum):
    """All kinds of keys."""

    ADMIN = "admin"
    PROJECT = "project"
    RUN = "run"
    TRAINER = "trainer"
    VIEWER = "viewer"
    REVIEWER = "reviewer"
    SESSION = "session"


@keys_app.command("list")
def keys_list(
    kind: Annotated[
        ListedKind | None, typer.Option(help="Only keys of this kind; default: all but keys of sessions.")
    ] = None,
    run: Annotated[str | None, typer.Option(help="Only keys of this run.")] = None,
    project: Annotated[str | None, typer.Option(help="Only keys of this project and of its runs.")] = None,
    revoked: Annotated[bool, typer.Option("--revoked", help="List revoked and expired keys as well.")] = False,
    limit: Annotated[int, typer.Option(help="Most entries to list.", min=1, max=200)] = 50,
    data_dir: DataDir = DEFAULT_DATA_DIR,
    url: Url = None,
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """List keys, newest first, without their texts. `*` marks the key that this command uses."""
    given = {"kind": kind, "run": run, "project": project, "revoked": "true" if revoked else None, "limit": limit}
    wanted = {name: str(value) for name, value in given.items() if value is not None}

    async def ask(base_rl: Operations) -> tuple[list[dict[str, Any]], str, dict[str, str]]:
        found = await base_rl.keys(wanted)
        names = {one["id"]: one["name"] for one in await base_rl.runs()}
        if any(one.get("project_id") for one in found):
            names |= {one["id"]: f"project {one['name']}" for one in await base_rl.projects()}
        return found, (await base_rl.own_key())["id"], names

    def show(found: tuple[list[dict[str, Any]], str, dict[str, str]]) -> None:
        keys, own, runs = found
        if as_json:
            out.print_json(json.dumps(keys))
        else:
            out.print(_table(keys, own, runs, time.time()))

    ask_and_show((data_dir, url, api_key), ask, show)


@keys_app.command("create")
def keys_create(
    kind: Annotated[
        Kind,
        typer.Option(
            help="`admin`: everything. `project`: everything in the runs of a project. `run`: agents. `trainer`: "
            "trainers. `viewer`: reads only. `reviewer`: rates sessions on the page."
        ),
    ],
    run: Annotated[str | None, typer.Option(help="The run of a run, trainer or reviewer key.")] = None,
    project: Annotated[
        str | None, typer.Option(help="Project of a project, trainer, viewer or reviewer key.")
    ] = None,
    all_runs: Annotated[bool, typer.Option("--all-runs", help="A trainer or viewer key for every run.")] = False,
    expires: Annotated[
        str | None, typer.Option(metavar="TIME", help="Time until the key expires, such as `30d`, `12h` or `90m`.")
    ] = None,
    label: Annotated[str | None, typer.Option(help="Purpose of the key, which `keys list` shows.")] = None,
    limit: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=NUMBER", help="A limit of a run or project key, such as `calls_per_minute=60`."),
    ] = None,
    data_dir: DataDir = DEFAULT_DATA_DIR,
    url: Url = None,
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """Create a key and print its text, which is shown only once."""
    given = {
        "kind": kind,
        "run": run,
        "project": project,
        "all_runs": all_runs or None,
        "name": label,
        "expires_in": None if expires is None else _seconds(expires),
        "limits": merged(None, limits_of(limit)) if limit else None,
    }
    body = {name: value for name, value in given.items() if value is not None}

    ask_and_show((data_dir, url, api_key), lambda base_rl: base_rl.create_key(body), _print_new, as_json=as_json)


@keys_app.command("change")
def keys_change(
    key: KeyArgument,
    label: Annotated[str | None, typer.Option(help="Another purpose of the key.")] = None,
    expires: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Time from now until the key expires, such as `30d`; `never` for none."),
    ] = None,
    data_dir: DataDir = DEFAULT_DATA_DIR,
    url: Url = None,
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """Change the label or the expiry of a key; its text stays. For its limits, see `base-rl limits set`."""
    body: dict[str, Any] = {} if label is None else {"name": label}
    if expires is not None:
        body["expires_in"] = None if expires == "never" else _seconds(expires)
    if not body:
        raise typer.BadParameter("give --label, --expires or both")
    ask_and_show(
        (data_dir, url, api_key),
        lambda base_rl: base_rl.change_key(key, body),
        lambda one: out.print(f"{one['id']}: {one['label'] or 'no label'}, {_state(one, time.time())}"),
        as_json=as_json,
    )


@keys_app.command("rotate")
def keys_rotate(
    key: KeyArgument,
    grace: Annotated[float, typer.Option(help="Seconds that the old key remains valid.", min=0)] = 0.0,
    data_dir: DataDir = DEFAULT_DATA_DIR,
    url: Url = None,
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """Replace a key by a new one for the same purpose, and print the new one's text.

    A key of the data directory's `keys.json` is replaced there too.
    """
    from proxy.cli.local_keys import replace

    async def ask(base_rl: Operations) -> tuple[dict[str, Any], str | None]:
        local = await _local_name(data_dir, base_rl.base_url, key) if url is None else None
        return await base_rl.rotate_key(key, grace), local

    def show(rotated: tuple[dict[str, Any], str | None]) -> None:
        made, local = rotated
        if local is not None:
            replace(data_dir, local, made["key"])
        if as_json:
            out.print_json(json.dumps(made))
        else:
            _print_new(made)
        if local is not None:
            errors.print(f"{data_dir}/keys.json has the new {local.replace('_', ' ')}.")
        if local == "trainer_key":
            errors.print("Restart `base-rl up`: its trainer has the old key until then.")

    ask_and_show((data_dir, url, api_key), ask, show)


@keys_app.command("revoke")
def keys_revoke(
    key: KeyArgument, data_dir: DataDir = DEFAULT_DATA_DIR, url: Url = None, api_key: ApiKey = None
) -> None:
    """Revoke a key. Other proxies on the store refuse it within 5 seconds. The last admin key is never revoked."""
    ask_and_show(
        (data_dir, url, api_key),
        lambda base_rl: base_rl.revoke_key(key),
        lambda _: out.print(f"{key} is revoked"),
    )


def _seconds(text: str) -> float:
    """Return a time such as `30d` in seconds. Raise BadParameter."""
    found = re.fullmatch(r"([1-9][0-9]{0,5})([smhd])", text)
    if found is None:
        raise typer.BadParameter(
            f"{text!r} is no time: write a number with s, m, h or d, such as 30d", param_hint="--expires"
        )
    return float(found[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[found[2]]


async def _local_name(data_dir: Path, url: str, key_id: str) -> str | None:
    """Return the entry of `keys.json` with this key's id, which the proxy reports for each entry's text; None if none
    has it."""
    from proxy.cli.local_keys import load
    from proxy.cli.operations import Operations, ProxyUnreachable

    keys = load(data_dir)
    if keys is None:
        return None
    for name in ("admin_key", "run_key", "trainer_key"):
        try:
            async with Operations(url, getattr(keys, name)) as operations:
                if (await operations.own_key())["id"] == key_id:
                    return name
        except ProxyUnreachable:  # this entry's key was revoked; another entry may be the one
            continue
    return None


def _print_new(made: dict[str, Any]) -> None:
    out.print(made["key"], soft_wrap=True)
    errors.print(f"This is {made['id']}. Keep the key: it is not shown again.")


def _table(keys: list[dict[str, Any]], own: str, runs: dict[str, str], now: float) -> Table:
    from proxy.admin.formatting import ago

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("key", no_wrap=True)
    for heading in ("kind", "for", "label", "created", "last used", "state"):
        table.add_column(heading)
    for one in keys:
        used = "" if one["last_used_at"] is None else ago(one["last_used_at"], now)
        table.add_row(
            one["id"] + (" *" if one["id"] == own else ""),
            one["kind"],
            _scope(one, runs),
            one["label"] or "",
            ago(one["created_at"], now),
            used,
            _state(one, now),
        )
    return table


def _scope(key: dict[str, Any], names: dict[str, str]) -> str:
    """Return the name of the key's run or project; "all runs" for a key without either."""
    scope = key["run_id"] or key.get("project_id")
    return names.get(scope, scope) if scope else "all runs"


def _state(key: dict[str, Any], now: float) -> str:
    revoked_at, expires_at = key["revoked_at"], key.get("expires_at")
    if revoked_at is not None and revoked_at <= now:
        return "revoked"
    if expires_at is not None and expires_at <= now:
        return "expired"
    if revoked_at is not None:
        return f"ends in {revoked_at - now:.0f} s"
    return "valid" if expires_at is None else f"expires in {_span(expires_at - now)}"


def _span(seconds: float) -> str:
    for name, size in (("d", 86400.0), ("h", 3600.0), ("m", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {name}"
    return f"{seconds:.0f} s"
