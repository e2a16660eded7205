"""The functions that judges in Python call, and whether this process may call them."""

from __future__ import annotations

import asyncio
import importlib
import inspect
from collections.abc import Callable
from typing import Any

from proxy.jobs.kinds import JobFailure, JobRefused
from proxy.settings import JudgingSettings


class Functions:
    """Calls functions of the operator's modules.

    A module must be listed in the installation's configuration: whoever may change a run's settings could otherwise
    run any code. A proxy calls no function unless it is configured to, because one that computes for long delays the
    calls of agents, and one that crashes ends them.
    """

    def __init__(self, settings: JudgingSettings, *, in_proxy: bool) -> None:
        self._settings = settings
        self._in_proxy = in_proxy

    def check(self, name: str) -> None:
        """Raise JobRefused if this process must not call the function `MODULE:NAME`."""
        module = name.partition(":")[0]
        if module not in self._settings.python_modules:
            raise JobRefused(
                f"the module {module!r} is not listed in [judging] python_modules, so no judge may call its functions"
            )
        if self._in_proxy and not self._settings.python_in_proxy:
            raise JobRefused(
                "judges in Python run in `base-rl worker` only, because code that computes for long or crashes would "
                "delay or end the calls of agents: set [jobs] broker and start a worker, or set [judging] "
                "python_in_proxy = true; then retry the job"
            )

    async def call(self, name: str, document: dict[str, Any]) -> Any:
        """Return what the function returns for a session, called on a thread unless it is a coroutine function.

        Raise JobRefused like `check`, and for a function that cannot be imported; JobFailure if it raises."""
        self.check(name)
        function = await asyncio.to_thread(_imported, name)
        try:
            if inspect.iscoroutinefunction(function):
                return await function(document)
            return await asyncio.to_thread(function, document)
        except Exception as error:
            # Not its message: it may quote the session, and errors of jobs stay when a session is erased.
            raise JobFailure(f"the function {name} raised {type(error).__name__}") from error


def _imported(name: str) -> Callable[..., Any]:
    module, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except Exception as error:
        raise JobRefused(f"the function {name} cannot be imported: {error}") from error
    if not callable(found):
        raise JobRefused(f"{name} is no function")
    return found  # type: ignore[no-any-return]
