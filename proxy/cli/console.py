"""Parts that all commands share: options, the choice of an installation, output, and exit statuses."""

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

DataDir = Annotated[Path, typer.Option(help="Directory with database, weights, keys and logs.")]
Config = Annotated[Path | None, typer.Option(help="TOML file; BASE_RL_SECTION__KEY in the environment overrides it.")]
Url = Annotated[str | None, typer.Option(help="Address of a running base-rl; default: the one in --data-dir.")]
ApiKey = Annotated[
    str | None, typer.Option(envvar="BASE_RL_ADMIN_KEY", help="Admin key; default: the one in --data-dir.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]

DEFAULT_DATA_DIR = Path(".base-rl")
# Width of tables for a program or a file, which must not be cut off.
_PIPED_WIDTH = 200


class SafeConsole(Console):
    """A console that prints all text literally: markup, names of emojis and control sequences have no effect.

    Agents choose names and messages, so the text is not trusted. Everything that is printed passes through `render`,
    tables and live displays included, so that no command can omit it. Give colours as `Text` with a style, or with
    `markup=True` for a constant.
    """

    def __init__(self, *, stderr: bool = False, width: int | None = None, **more: Any) -> None:
        super().__init__(stderr=stderr, width=width, markup=False, emoji=False, highlight=False, **more)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        for segment in super().render(renderable, options):
            text, style, control = segment
            yield segment if control or text.isprintable() else Segment(visible(text), style)

    def render_str(self, text: str, **more: Any) -> Text:
        """Make the cells of tables visible before their columns are measured."""
        return super().render_str(visible(text), **more)


out = SafeConsole(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else _PIPED_WIDTH)
errors = SafeConsole(stderr=True)


def print_error(message: str) -> None:
    """Print on standard error why a command failed."""
    errors.print("error: ", style="bold red", end="")
    errors.print(message, soft_wrap=True)


class Refused(Exception):
    """A command cannot do what was asked. The message has the reason, and what to do."""


def where(data_dir: Path, url: str | None, api_key: str | None) -> tuple[str, str]:
    """Return the given address and admin key, or those of the installation in the data directory."""
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
    """Run a command and exit with its status. Errors that users can fix are one line; a bug keeps its traceback."""
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
