"""`base-rl claims …`: list the trajectories that trainers have claimed, and take them back."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer
from rich.table import Table

from proxy.cli.asking import ask_and_show
from proxy.cli.console import DEFAULT_DATA_DIR, ApiKey, AsJson, DataDir, Url, out

_ID_WIDTH = 30

claims_app = typer.Typer(no_args_is_help=True, help="Claims: the trajectories that trainers are working on.")

Run = Annotated[str, typer.Argument(help="The run's name.")]


@claims_app.command("list")
def claims_list(
    run: Run,
    limit: Annotated[int, typer.Option(help="Most entries to list.", min=1, max=200)] = 20,
    data_dir: DataDir = DEFAULT_DATA_DIR,
    url: Url = None,
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """List claims: leased ones first, then earlier ones with how they ended."""
    from proxy.admin.formatting import ago

    def show(claims: list[dict[str, Any]]) -> None:
        table = Table(box=None, pad_edge=False, header_style="bold")
        table.add_column("claim", no_wrap=True, min_width=_ID_WIDTH)
        for heading in ("state", "size", "from", "made", "at", "lease", "trainer"):
            table.add_column(heading, no_wrap=True)
        now = time.time()
        for one in claims:
            made = one["committed_version"]
            left = one["lease_expires_at"] - now
            table.add_row(
                one["id"],
                one["state"],
                str(one["sessions"]),
                f"v{one['base_version']}",
                "" if made is None else f"v{made}",
                ago(one["created_at"], now),
                f"{left:.0f} s" if one["state"] == "leased" else "",
                one["trainer"] if one["process"] is None else f"{one['trainer']} {one['process']}",
            )
        out.print(table)

    ask_and_show((data_dir, url, api_key), lambda base_rl: base_rl.claims(run, limit), show, as_json=as_json)


@claims_app.command("release")
def claims_release(
    run: Run,
    claim: Annotated[str, typer.Argument(help="The claim's id, as `claims list` shows it.")],
    data_dir: DataDir = DEFAULT_DATA_DIR,
    url: Url = None,
    api_key: ApiKey = None,
) -> None:
    """Take a claim back: its trajectories are claimable at once.

    A trainer that still works on it loses that work: its commit is refused, and it starts again from the head.
    """
    ask_and_show(
        (data_dir, url, api_key),
        lambda base_rl: base_rl.release_claim(run, claim),
        lambda _: out.print(f"{claim} is released"),
    )
