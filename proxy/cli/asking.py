"""The course of a command that asks a running base-rl: connect, ask, print the answer, and exit."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TypeVar

from proxy.cli.console import finish, out, where

if TYPE_CHECKING:
    from proxy.cli.operations import Operations

Found = TypeVar("Found")

Place = tuple[Path, str | None, str | None]
"""The options --data-dir, --url and --api-key."""


def ask_and_show(
    place: Place,
    ask: Callable[[Operations], Awaitable[Found]],
    show: Callable[[Found], int | None],
    *,
    as_json: bool = False,
) -> NoReturn:
    """Ask the base-rl at `place` and print its answer: as JSON if `as_json`, else by `show`.

    The exit status is 0, or the number that `show` returns; 1 if the answer is an error.
    """

    async def asked() -> Found:
        from proxy.cli.operations import Operations

        async with Operations(*where(*place)) as operations:
            return await ask(operations)

    def command() -> int:
        found = asyncio.run(asked())
        if not as_json:
            return show(found) or 0
        out.print_json(json.dumps(found))
        return 0

    finish(command)
