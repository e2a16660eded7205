"""`base-rl export --in-background`: an export that a background job of the proxy writes."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from proxy.cli.console import Refused, out
from proxy.cli.operations import Operations

POLL_SECONDS = 1.0
_ENDED_BADLY = ("dead", "cancelled")


async def export_in_background(address: str, key: str, run: str, body: Mapping[str, Any], *, wait: bool) -> None:
    """Begin the export that `body` describes, with `wait` wait for its end, and print where the file is.

    If this is cancelled, the job goes on. Raises ProxyUnreachable, also if the run has an export of that name, and
    Refused if the job ends without a file.
    """
    async with Operations(address, key) as operations:
        found = await operations.begin_export(run, body)
        look = f"base-rl jobs show {found['job']}"
        out.print(f"export {body['name']!r} begun; `{look}` shows its state", soft_wrap=True)
        if not wait:
            return
        told = None
        while found["state"] != "done":
            if found["state"] in _ENDED_BADLY:
                raise Refused(f"the export is {found['state']}: {found['error']}; `{look}` shows what can be done")
            if found["error"] != told:
                told = found["error"]
                out.print(f"it failed and will be tried again: {told}", soft_wrap=True)
            try:
                await asyncio.sleep(POLL_SECONDS)
            except asyncio.CancelledError:
                out.print(f"the job goes on without this command; `{look}` shows its state", soft_wrap=True)
                raise
            found = await operations.background_export(run, str(body["name"]))
        out.print(f"{found['sessions']} sessions, {found['bytes']} bytes: {found['address']}", soft_wrap=True)
