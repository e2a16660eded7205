"""Parts that all commands share: options, the installation that is meant, output, and how a command ends."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from proxy.contract.visible import visible

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
"""Width of tables that no terminal bounds: a program or a file gets them whole."""


class SafeConsole(Console):
    """A console on which text is text: nothing in it is markup, an emoji's name or a control sequence.

    Whatever is printed goes through `render`, tables and live pictures as well, so no command can forget it. Colours
    are given as `Text` and styles, or with `markup=True` for a constant.
    """

    def __init__(self, *, stderr: bool = False, width: int | None = None, **more: Any) -> None:
        super().__init__(stderr=stderr, width=width, markup=False, emoji=False, highlight=False, **more)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        for segment in super().render(renderable, options):
            text, style, control = segment
            yield segment if control or text.isprintable() else Segment(visible(text), style)

    def render_str(self, text: str, **more: Any) -> Text:
        """Cells of tables come here before their columns are measured."""
        return super().render_str(visible(text), **more)


out = SafeConsole(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else _PIPED_WIDTH)
errors = SafeConsole(stderr=True)


def print_error(message: str) -> None:
    """Say on standard error why a command ended."""
    errors.print("error: ", style="bold red", end="")
    errors.print(message, soft_wrap=True)


class Refused(Exception):
    """A command cannot do what it was told. The message says why, and what to do."""


def where(data_dir: Path, url: str | None, api_key: str | None) -> tuple[str, str]:
    """Return address and admin key: as given, else those of the installation in the data directory."""
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
    """Run a command and end with its status. Errors that users can mend are one line; a bug keeps its traceback."""
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
        print_error(str(error))
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except asyncio.CancelledError:  # by a signal, see `end_on_signals`
        from proxy.cli.signals import exit_status

        raise SystemExit(exit_status()) from None
    raise SystemExit(code)
