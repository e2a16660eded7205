"""`base-rl db`: work on the store directly, whether a proxy runs or not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from proxy.cli.console import AsJson, Config, finish, out, print_error

db_app = typer.Typer(no_args_is_help=True, help="The trajectory store: upgrade it, check it, back it up.")

StoreDir = Annotated[
    Path | None, typer.Option("--data-dir", help="Data directory with the store; default: [server] data_dir.")
]


@db_app.command()
def upgrade(config: Config = None, data_dir: StoreDir = None) -> None:
    """Migrate the store to the tables of this version. The proxy does this itself when it starts."""

    def run() -> int:
        from proxy.database import migrate

        url = _url(config, data_dir)
        migrate.upgrade(url)
        out.print(f"the store is at revision {migrate.current(url)}")
        return 0

    finish(_one_line_errors(run))


@db_app.command()
def check(config: Config = None, data_dir: StoreDir = None, as_json: AsJson = False) -> None:
    """Check that the store is undamaged and its rows agree. The exit status is 1 if they do not."""

    def run() -> int:
        import msgspec

        from proxy.lifecycle.check import check as findings_of

        findings = findings_of(_url(config, data_dir))
        if as_json:
            out.print_json(json.dumps(msgspec.to_builtins(findings)))
        for finding in findings if not as_json else ():
            out.print(Text.assemble(("✗ ", "red"), (f"{finding.name} ", "bold")), end="")
            examples = f": {', '.join(finding.examples)}{', …' if finding.count > len(finding.examples) else ''}"
            line = f"{finding.detail} ({finding.count}{examples if finding.examples else ''})"
            out.print(line, soft_wrap=True)
        if not findings and not as_json:
            out.print("[green]✓[/] the store is whole", markup=True)
        return 1 if findings else 0

    finish(_one_line_errors(run))


@db_app.command()
def backup(
    target: Annotated[Path, typer.Argument(help="The file to write; it must not exist.")],
    config: Config = None,
    data_dir: StoreDir = None,
) -> None:
    """Copy the store to a file while it is in use, PostgreSQL by pg_dump. Weights are files: copy them too."""

    def run() -> int:
        from proxy.database.backup import backup as write

        size = write(_url(config, data_dir), target)
        out.print(f"{target}: {size:,} bytes, checked", soft_wrap=True)
        return 0

    finish(_one_line_errors(run))


def _url(config: Path | None, data_dir: Path | None) -> str:
    """Return the URL of a store that exists. Raises ConfigurationError otherwise: SQLite would create an empty
    one."""
    from sqlalchemy import make_url

    from proxy.settings import ConfigurationError, load_settings

    settings = load_settings(config, {"server": {"data_dir": data_dir}} if data_dir is not None else None)
    url = settings.database_url
    if url.startswith("sqlite") and not Path(str(make_url(url).database)).exists():
        raise ConfigurationError(
            f"there is no store at {make_url(url).database}: name its data directory with --data-dir, or its "
            "configuration with --config"
        )
    return url


def _one_line_errors(command: Callable[[], int]) -> Callable[[], Any]:
    """Return the command with one line of error, and status 1, for a store that does not answer."""

    def run() -> int:
        from proxy.errors import StoreUnavailable

        try:
            return command()
        except StoreUnavailable as error:
            print_error(error.message)
            return 1

    return run
