"""Work that is finished although whoever waits for it is cancelled."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")


async def despite_cancellation(work: Coroutine[Any, Any, Result]) -> Result:
    """Do the work to its end and return its result, or raise what it raises.

    A caller that is cancelled meanwhile, even twice, gets CancelledError only when the work has ended. So the work
    must bound its waits.
    """
    task = asyncio.create_task(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        while not task.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait({task})
        raise
