"""Wait for a run's proxy on a thread, so that runs whose proxy is down do not delay the others.

What waits for what: the thread sends one request again and again until the proxy answers; then it wakes the rotation,
which begins the run in a turn of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import copy_context
from threading import Condition, Thread

from trainer.errors import TrainerError
from trainer.proxy_client import ProxyClient

Connect = Callable[[], ProxyClient]
"""Return a client of a run that retries forever. Raises TrainerError if the run's configuration is wrong."""


class Arrival:
    """A run that is not trained yet because its proxy has not answered. Only the first rank has arrivals."""

    def __init__(self, connect: Connect, changed: Condition, after: float = 0.0) -> None:
        """`after` is the pause in seconds before the first request, for a run that could not be begun."""
        self._connect = connect
        self._changed = changed
        self._after = after
        self._client: ProxyClient | None = None
        self._has_ended = False
        self._error: TrainerError | None = None
        # The thread logs in the context of its creator, which names the run.
        self._thread = Thread(target=copy_context().run, args=(self._wait,), name="arrival", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def has_ended(self) -> bool:
        """Return whether the proxy has answered. Call it with the condition locked."""
        return self._has_ended

    @property
    def error(self) -> TrainerError | None:
        """The error of the run's configuration, or the refusal of the proxy."""
        return self._error

    def close(self) -> None:
        """End the thread without waiting for it: its pending request fails, and its result is not used."""
        if self._client is not None:
            self._client.close()

    def _wait(self) -> None:
        error: TrainerError | None = None
        try:
            self._client = self._connect()
            if self._after:
                self._client.pause(self._after)
            self._client.head()
        except TrainerError as refusal:
            error = refusal
        with self._changed:
            self._error, self._has_ended = error, True
            self._changed.notify_all()
