"""Notice an engine whose process has stopped answering, and end all waiting for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from proxy.engines.protocol import Engine
from proxy.errors import BaseRlError, EngineTimeout
from proxy.log import logger

# Pings within the patience, all of which must stay unanswered: one lost connection does not mean a hung engine.
_PINGS = 3
# Part of the patience that counts as all of it: timers may fire a little early.
_ROUNDING = 0.99

_LOG = logger(__name__)


class EngineWatch:
    """Watches one engine. Start `run_forever` as a task; cancel it to end.

    A ping tells a busy engine from a hung one: the engine's HTTP server answers it while the model computes, however
    long a prompt takes. A stopped process still accepts connections and never answers on them. After
    `patience_seconds` without any answer, running calls fail, new ones are refused, and `changed` is called; it is
    called again when the engine answers. An engine that has never answered may still be starting and is not watched.
    """

    def __init__(
        self, engine: Engine, *, interval_seconds: float, patience_seconds: float, changed: Callable[[], None]
    ) -> None:
        self._engine = engine
        self._interval = interval_seconds
        self._patience = patience_seconds
        self._changed = changed
        self.is_answering: bool | None = None
        """Whether the engine answered the last ping; None before the first one."""
        self.answered_at: float | None = None
        """Loop time of the last answer; None before the first one."""
        self._silent_since: float | None = None
        self._is_hung = False

    async def run_forever(self) -> None:
        """Ping until cancelled."""
        while True:
            began = asyncio.get_running_loop().time()
            await self.ping_once()
            # An unanswered ping has taken its time already, so the next one follows at once.
            spent = asyncio.get_running_loop().time() - began
            await asyncio.sleep(max(0.0, self._interval - spent))

    async def ping_once(self) -> None:
        """Ping the engine; suspend it after too long a silence, and restore it when it answers."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            await self._engine.ping(self._patience / _PINGS)
        except EngineTimeout:
            self.is_answering = False
            if self._silent_since is None:
                self._silent_since = began
            silent = loop.time() - self._silent_since
            if self.answered_at is not None and not self._is_hung and silent >= self._patience * _ROUNDING:
                self._suspend(silent)
        except BaseRlError:
            self.is_answering = False
            self._end_silence("hung engine is gone")  # nothing listens any more: calls notice that at once
        else:
            self.is_answering, self.answered_at = True, loop.time()
            self._end_silence("engine answers again")

    def _suspend(self, silent: float) -> None:
        self._is_hung = True
        _LOG.warning("engine hung", engine=self._engine.name, silent_seconds=round(silent, 1))
        self._engine.suspend(f"the engine has not answered for {silent:.0f} s: its process hangs or is stopped")
        self._changed()

    def _end_silence(self, message: str) -> None:
        loop = asyncio.get_running_loop()
        silent = loop.time() - self._silent_since if self._silent_since is not None else 0.0
        self._silent_since = None
        if not self._is_hung:
            return
        self._is_hung = False
        _LOG.warning(message, engine=self._engine.name, silent_seconds=round(silent, 1))
        self._engine.restore()
        self._changed()
