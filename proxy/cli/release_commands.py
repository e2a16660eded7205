"""`base-rl versions gates|promote|hold|holds|release`: what gates have found, and what people decide instead."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from proxy.cli.asking import ask_and_show
from proxy.cli.console import DEFAULT_DATA_DIR, ApiKey, AsJson, DataDir, Url, out
from proxy.cli.versions_commands import Reason, RunArgument, VersionArgument, change_versions, versions_app


@versions_app.command("gates")
def versions_gates(
    run: RunArgument,
    limit: Annotated[int, typer.Option(help="Most versions to list.", min=1, max=100)] = 5,
    data_dir: DataDir = DEFAULT_DATA_DIR,
    url: Url = None,
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """Show what the gates have found about the newest versions: what they wait for, or why they passed or failed."""

    def show(found: dict[str, Any]) -> None:
        if not found["versions"]:
            out.print("no gate has found anything yet: release.policy and release.rollback say what is looked at")
            return
        table = Table(box=None, pad_edge=False, header_style="bold")
        for heading in ("version", "state", "gate", "", "finding"):
            table.add_column(heading, no_wrap=heading != "finding")
        for version in found["versions"]:
            for finding in version["findings"]:
                named = str(version["version"]), version["state"], finding["gate"], finding["state"]
                table.add_row(*named, Text(finding["text"]))
        out.print(table)

    path = f"versions/gates?limit={limit}"
    ask_and_show((data_dir, url, api_key), lambda base_rl: base_rl.of_run(run, path), show, as_json=as_json)


@versions_app.command("evaluation-secret")
def versions_evaluation_secret(
    run: RunArgument,
    data_dir: DataDir = DEFAULT_DATA_DIR,
    url: Url = None,
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """Print the secret that signs the requests to a run's evaluator (`release.evaluation.url`)."""
    ask_and_show(
        (data_dir, url, api_key),
        lambda base_rl: base_rl.evaluation_secret(run),
        lambda found: out.print(found["secret"], markup=False, soft_wrap=True),
        as_json=as_json,
    )


@versions_app.command("promote")
def versions_promote(
    run: RunArgument,
    version: VersionArgument,
    reason: Reason,
    data_dir: DataDir = DEFAULT_DATA_DIR,
    url: Url = None,
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """Let a version serve that waits for its gates, or for you under `release.policy = "manual"`."""
    change_versions((data_dir, url, api_key), run, f"{version}/promote", {"reason": reason}, as_json=as_json)


@versions_app.command("hold")
def versions_hold(
    run: RunArgument,
    version: VersionArgument,
    reason: Reason,
    key: Annotated[str | None, typer.Option(help="Id of the key whose calls the version answers.")] = None,
    share: Annotated[
        float | None, typer.Option(min=0.0, max=0.5, help="Share of new sessions that the version answers.")
    ] = None,
    data_dir: DataDir = DEFAULT_DATA_DIR,
    url: Url = None,
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """Keep the calls of a key, or a share of new sessions, on a version while others move on.

    A run of adapters serves it on the same engines. A run of whole weights needs another engine for it.
    """
    body = {"reason": reason, **({"key_id": key} if key is not None else {}), **({"share": share} if share else {})}

    def show(hold: dict[str, Any]) -> None:
        who = f"the key {hold['key_id']}" if hold["key_id"] else f"{hold['share']:g} of the new sessions"
        out.print(f"{hold['id']}: version {hold['version']} answers {who}", soft_wrap=True)

    ask_and_show(
        (data_dir, url, api_key),
        lambda base_rl: base_rl.change_versions(run, f"{version}/hold", body),
        show,
        as_json=as_json,
    )


@versions_app.command("release")
def versions_release(
    run: RunArgument,
    hold: Annotated[str, typer.Argument(help="Id of the hold, as `versions holds` shows it.")],
    reason: Reason,
    data_dir: DataDir = DEFAULT_DATA_DIR,
    url: Url = None,
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """Let the sessions of a hold be answered by the serving version again."""
    ask_and_show(
        (data_dir, url, api_key),
        lambda base_rl: base_rl.change_versions(run, f"holds/{hold}/release", {"reason": reason}),
        _show_holds,
        as_json=as_json,
    )


@versions_app.command("holds")
def versions_holds(
    run: RunArgument,
    data_dir: DataDir = DEFAULT_DATA_DIR,
    url: Url = None,
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """List what is held on which version."""
    ask_and_show(
        (data_dir, url, api_key), lambda base_rl: base_rl.of_run(run, "versions/holds"), _show_holds, as_json=as_json
    )


def _show_holds(found: dict[str, Any]) -> None:
    if not found["holds"]:
        out.print("nothing is held")
    for hold in found["holds"]:
        who = f"the key {hold['key_id']}" if hold["key_id"] else f"{hold['share']:g} of the new sessions"
        out.print(
            f"{hold['id']}: version {hold['version']} answers {who}: {json.dumps(hold['reason'])}", soft_wrap=True
        )
