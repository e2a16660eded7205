"""In-process wake-ups for waiters: a hint that something changed, never the fact itself.

A waiter re-reads the database after every wake-up and after a bounded time without one, so a hint that another
process could not give only costs that bound.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence


class Signal:
    """Wakes everybody who waits at the moment of `notify`."""

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self.count = 0
        """How often it was given; read it before looking at the database, and pass it to `wait`."""

    def notify(self) -> None:
        self.count += 1
        event, self._event = self._event, asyncio.Event()
        event.set()

    async def wait(self, timeout: float, *, since: int | None = None) -> bool:
        """Waits for the next `notify`, `timeout` seconds at most. Returns whether it came.

        With `since`, one that came after that `count` is not missed.
        """
        if since is not None and since != self.count:
            return True
        try:
            async with asyncio.timeout(timeout):
                await self._event.wait()
        except TimeoutError:
            return False
        return True


class Endings:
    """Tells listeners at once which sessions may have ended. A listener neither raises nor waits."""

    def __init__(self) -> None:
        self._listeners: list[Callable[[Sequence[str]], None]] = []

    def listen(self, listener: Callable[[Sequence[str]], None]) -> None:
        self._listeners.append(listener)

    def notify(self, session_ids: Sequence[str]) -> None:
        """To be called after the commit."""
        for listener in self._listeners:
            listener(session_ids)


class Erasures:
    """Tells listeners which sessions were erased, by this process or another, so that they forget them. A listener
    neither raises nor waits, and may be told the same again."""

    def __init__(self) -> None:
        self._listeners: list[Callable[[frozenset[str]], None]] = []

    def listen(self, listener: Callable[[frozenset[str]], None]) -> None:
        self._listeners.append(listener)

    def notify(self, session_ids: Iterable[str]) -> None:
        """To be called after the commit."""
        erased = frozenset(session_ids)
        for listener in self._listeners if erased else ():
            listener(erased)


class Signals:
    """`trajectories`: a session may have become claimable. `versions`: a version was committed or served.
    `events`: something was appended to the event log. `endings`: sessions may have ended. `erasures`: sessions were
    erased; `requested_erasures`: those of them that somebody asked for, and not retention, whose are long over."""

    def __init__(self) -> None:
        self.endings = Endings()
        self.erasures = Erasures()
        self.requested_erasures = Erasures()
        self.trajectories = Signal()
        self.versions = Signal()
        self.events = Signal()
