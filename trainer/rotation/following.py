"""Ask a proxy for its active runs, again and again on a thread, for a trainer that trains all of them."""

from __future__ import annotations

from contextvars import copy_context
from threading import Condition, Thread

import structlog

from trainer.errors import ProxySilent, TrainerError
from trainer.proxy_client import RunLister

# A new run waits for this long at most. The answer costs the proxy a few queries.
_SECONDS_BETWEEN = 5.0

_log = structlog.get_logger("trainer")


class Following:
    """The active runs of a proxy, as of its last answer. Only the first rank asks."""

    def __init__(self, lister: RunLister, changed: Condition) -> None:
        self._lister = lister
        self._changed = changed
        self._active: tuple[str, ...] | None = None
        self._error: TrainerError | None = None
        self._ended = False
        self._thread = Thread(target=copy_context().run, args=(self._work,), name="following", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def active(self) -> tuple[str, ...] | None:
        """Return the names of the active runs, oldest first; None before the first answer. Call it with the condition
        locked. Raises ProxyRefused if the proxy refused the question."""
        if self._error is not None:
            raise self._error
        return self._active

    def close(self) -> None:
        """End the thread without waiting for it."""
        self._ended = True
        self._lister.close()

    def _work(self) -> None:
        is_silent = False
        while not self._ended:
            try:
                found = self._lister.active()
            except ProxySilent as error:
                # Runs stay as they are while the proxy is down: each run waits for it by itself.
                if not is_silent and not self._ended:
                    _log.warning("the proxy does not answer, trying again", request="GET /runs", reason=str(error))
                is_silent = True
            except TrainerError as error:
                with self._changed:
                    self._error = error
                    self._changed.notify_all()
                return
            else:
                is_silent = False
                with self._changed:
                    if found != self._active:
                        self._active = found
                        self._changed.notify_all()
            self._lister.pause(_SECONDS_BETWEEN)
