"""Notice an engine whose process has stopped answering, and stop waiting for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from proxy.engines.interface import Engine
from proxy.errors import BaseRlError, EngineTimeout
from proxy.log import logger

_PINGS = 3
"""How many pings in a row must stay unanswered: one lost connection is no hung engine."""

_LOG = logger(__name__)


class EngineWatch:
    """Start `run_forever` as a task; cancel it to end.

    A busy engine is told from a hung one by asking what costs it nothing: its HTTP server answers that while the
    model computes, however long a prompt takes. A stopped process still accepts connections, and never answers on
    them. After `patience_seconds` without any answer, calls in flight fail, new ones are refused, and `changed` is
    called; it is called again when the engine answers. An engine that was never heard may still be starting, and is
    not watched.
    """

    def __init__(
        self, engine: Engine, *, interval_seconds: float, patience_seconds: float, changed: Callable[[], None]
    ) -> None:
        self._engine = engine
        self._interval = interval_seconds
        self._patience = patience_seconds
        self._changed = changed
        self._was_heard = False
        self._silent_since: float | None = None
        self._is_hung = False

    async def run_forever(self) -> None:
        """Ping until cancelled."""
        while True:
            began = asyncio.get_running_loop().time()
            await self.look()
            # An unanswered ping took its time already: the next one follows at once.
            spent = asyncio.get_running_loop().time() - began
            await asyncio.sleep(max(0.0, self._interval - spent))

    async def look(self) -> None:
        """Ping the engine once, and act on what that says."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            await self._engine.ping(self._patience / _PINGS)
        except EngineTimeout:
            if self._silent_since is None:
                self._silent_since = began
            silent = loop.time() - self._silent_since
            if self._was_heard and not self._is_hung and silent >= self._patience * 0.99:
                self._give_up(silent)
        except BaseRlError:
            self._heard(answers=False)  # nobody is there: calls find that out by themselves, at once
        else:
            self._was_heard = True
            self._heard(answers=True)

    def _give_up(self, silent: float) -> None:
        self._is_hung = True
        _LOG.warning("engine hung", engine=self._engine.name, silent_seconds=round(silent, 1))
        self._engine.suspend(f"the engine has not answered for {silent:.0f} s: its process hangs or is stopped")
        self._changed()

    def _heard(self, *, answers: bool) -> None:
        loop = asyncio.get_running_loop()
        silent = loop.time() - self._silent_since if self._silent_since is not None else 0.0
        self._silent_since = None
        if not self._is_hung:
            return
        self._is_hung = False
        told = "engine answers again" if answers else "hung engine is gone"
        _LOG.warning(told, engine=self._engine.name, silent_seconds=round(silent, 1))
        self._engine.restore()
        self._changed()
