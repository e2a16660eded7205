"""`base-rl erase`: remove the content of sessions."""

from __future__ import annotations

import asyncio
import json
from typing import Annotated, Any

import typer

from proxy.cli.console import DEFAULT_DATA_DIR, ApiKey, AsJson, DataDir, Url, finish, out, where


def erase(
    session: Annotated[str | None, typer.Option(help="A session: its id, or the client's own name.")] = None,
    user: Annotated[str | None, typer.Option(help="All sessions of a user, as the agent named the user.")] = None,
    run: Annotated[str | None, typer.Option(help="Only sessions of this run; default: of all runs.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be erased, and erase nothing.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
    data_dir: DataDir = DEFAULT_DATA_DIR,
    url: Url = None,
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """Erase the content of sessions permanently.

    The sessions themselves, their rewards, and the versions that were trained on them stay recorded, and are printed.
    """
    if (session is None) == (user is None):
        raise typer.BadParameter("name --session or --user, one of them")
    target = {key: value for key, value in (("session", session), ("user", user), ("run", run)) if value is not None}

    async def ask(*, dry: bool) -> dict[str, Any]:
        from proxy.cli.operations import Operations

        async with Operations(*where(data_dir, url, api_key)) as operations:
            body = json.dumps({**target, "dry_run": dry}).encode()
            return await operations.send("/api/v1/erase", {}, body)

    def show() -> int:
        report = asyncio.run(ask(dry=True))
        if not dry_run:
            if not yes and report["erased"]:
                typer.confirm(f"{_sentence(report)}. This cannot be undone. Erase?", abort=True)
            report = asyncio.run(ask(dry=False))
        if as_json:
            out.print_json(json.dumps(report))
        else:
            out.print(f"{_sentence(report)}.", soft_wrap=True)
            for learnt in report["versions"]:
                what = f"{learnt['run']}@{learnt['version']} learnt from {learnt['sessions']} of the sessions"
                out.print(what, soft_wrap=True)
            if report["leased"]:
                out.print(f"{report['leased']} are in a trainer's current step", soft_wrap=True)
        return 0

    finish(show)


def _sentence(report: dict[str, Any]) -> str:
    verb = "would be erased" if report["dry_run"] else "erased"
    found = f"{report['sessions']} sessions with {report['turns']} turns found, {report['erased']} {verb}"
    left = report["content_left"]
    return found if report["dry_run"] or not left else f"{found}, the content of {left} still being removed"
