"""In-process signals that wake waiters. A signal is a hint that something changed, never the fact itself.

A waiter reads the database again after every signal, and after a bounded time without one, because changes by other
processes send no signal here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable


class Signal:
    """Wakes everybody who waits when `notify` is called."""

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self.count = 0
        """The number of calls of `notify`. Read it before the database, and pass it to `wait`."""

    def notify(self) -> None:
        self.count += 1
        event, self._event = self._event, asyncio.Event()
        event.set()

    async def wait(self, timeout: float, *, since: int | None = None) -> bool:
        """Wait for the next `notify`, `timeout` seconds at most, and return whether it came.

        With `since`, a `notify` after that `count` returns at once.
        """
        if since is not None and since != self.count:
            return True
        try:
            async with asyncio.timeout(timeout):
                await self._event.wait()
        except TimeoutError:
            return False
        return True


class SessionSignal:
    """Calls listeners with the ids of sessions that changed, by this process or another.

    A listener must not raise or block, and may be called more than once with the same session.
    """

    def __init__(self) -> None:
        self._listeners: list[Callable[[frozenset[str]], None]] = []

    def listen(self, listener: Callable[[frozenset[str]], None]) -> None:
        self._listeners.append(listener)

    def notify(self, session_ids: Iterable[str]) -> None:
        """Call the listeners. To be used after the commit."""
        changed = frozenset(session_ids)
        for listener in self._listeners if changed else ():
            listener(changed)


class Signals:
    """The signals of one process.

    - `trajectories`: a session may have become claimable.
    - `versions`: a version was committed or served.
    - `events`: the event log has new entries.
    - `jobs`: a job was enqueued, or may run earlier than before.
    - `endings`: sessions may have ended.
    - `erasures`: sessions were erased.
    - `requested_erasures`: sessions were erased on request, not by retention, which only erases sessions long ended.
    """

    def __init__(self) -> None:
        self.endings = SessionSignal()
        self.erasures = SessionSignal()
        self.requested_erasures = SessionSignal()
        self.trajectories = Signal()
        self.versions = Signal()
        self.events = Signal()
        self.jobs = Signal()
