"""What the commands share: options, which installation is meant, output, and how a command ends."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console

DataDir = Annotated[Path, typer.Option(help="Where database, weights, keys and logs are kept.")]
Config = Annotated[
    Path | None, typer.Option(help="TOML file; the environment (BASE_RL_SECTION__KEY) is laid over it.")
]
Url = Annotated[str | None, typer.Option(help="Address of a base-rl; default: the one of --data-dir.")]
ApiKey = Annotated[
    str | None, typer.Option(envvar="BASE_RL_ADMIN_KEY", help="Admin key; default: that of --data-dir.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]

DEFAULT_DATA_DIR = Path(".base-rl")
_PIPED_WIDTH = 200
"""Of tables that no terminal bounds: a program or a file gets them whole."""

out = Console(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else _PIPED_WIDTH)
errors = Console(stderr=True)


class Refused(Exception):
    """What a command was told to do cannot be done. The message says why, and what to do."""


def where(data_dir: Path, url: str | None, api_key: str | None) -> tuple[str, str]:
    """Address and admin key: as given, else those of the installation in the data directory."""
    from proxy.cli.local_keys import load
    from proxy.cli.operations import ProxyUnreachable
    from proxy.cli.stack import read_address

    if url is None:
        address = read_address(data_dir)
        if address is None:
            raise ProxyUnreachable(
                f"no base-rl is up with the data directory {data_dir}. "
                "Start one with `base-rl up --model …`, or name its address with --url and --api-key"
            )
        url = address.url
    if api_key is None:
        keys = load(data_dir)
        if keys is None:
            raise ProxyUnreachable(f"no keys in {data_dir}; pass an admin key with --api-key")
        api_key = keys.admin_key
    return url, api_key


def finish(command: Any) -> NoReturn:
    """Runs a command and turns what users can mend into one clear line; a bug keeps its traceback."""
    from proxy.cli.addresses import NoFreePort
    from proxy.cli.models import ModelNotUsable
    from proxy.cli.operations import ProxyUnreachable
    from proxy.cli.stack import AlreadyRunning
    from proxy.cli.supervisor import PartFailed
    from proxy.settings import ConfigurationError

    expected = (
        AlreadyRunning,
        ConfigurationError,
        ModelNotUsable,
        NoFreePort,
        PartFailed,
        ProxyUnreachable,
        Refused,
    )
    try:
        code = command()
    except expected as error:
        errors.print("[bold red]error:[/] ", end="")
        errors.print(str(error), markup=False, highlight=False, soft_wrap=True)
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except asyncio.CancelledError:  # by SIGTERM, see `end_on_sigterm`
        raise SystemExit(143) from None
    raise SystemExit(code)
