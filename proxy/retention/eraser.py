"""Marks of erasure, the deletion of marked content, and the news of marks to processes that cache sessions."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Protocol

from sqlalchemy import Connection

from proxy.clock import Clock
from proxy.database.unit_of_work import Database
from proxy.lifecycle.events import append_event
from proxy.lifecycle.outbox import enqueue
from proxy.lifecycle.signals import Signals
from proxy.retention.repository import ErasedReason, ErasureRepository

EMPTYING = "sessions.empty"
"""The kind of job that deletes the content of marked sessions."""

_SESSIONS_AT_ONCE = 64
# Bounds of one deleting transaction, which other writes wait for.
_TURNS_AT_ONCE = 200
# Transactions in one request or round.
_BATCHES = 20
# How far back polling reads marks again: the clocks of proxies differ, and a mark's commit comes after its time.
_OVERLAP_SECONDS = 60.0
# The pause between two rounds of deletions, in which other writes have their turn.
_PAUSE_SECONDS = 0.1


class ErasureObserver(Protocol):
    """Receives erasures after their commit, for metrics. It must neither raise nor block."""

    def sessions_erased(self, sessions: int, *, reason: str) -> None: ...


class SessionEraser:
    """Marks sessions as erased, deletes the content of marked ones, and polls for marks of other processes."""

    def __init__(
        self, database: Database, signals: Signals, clock: Clock, observer: ErasureObserver | None = None
    ) -> None:
        self._database = database
        self._signals = signals
        self._clock = clock
        self._observer = observer
        self._seen_marks: dict[str, float] = {}
        self._scrubbing_due = True

    async def mark(self, session_ids: Sequence[str], reason: ErasedReason, *, by: str) -> int:
        """Mark sessions as erased. Return how many were not marked before."""
        if not session_ids:
            return 0
        now = self._clock()
        marked = await self._database.commit(partial(_mark, session_ids, reason, by, now))
        if marked:
            self._signals.jobs.notify()
            self._signals.trajectories.notify()
            self._signals.events.notify()
            if self._observer is not None:
                self._observer.sessions_erased(marked, reason=reason.value)
        self._notify(session_ids, requested=session_ids if reason is ErasedReason.REQUESTED else ())
        return marked

    async def empty(self, session_ids: Sequence[str] | None = None) -> int:
        """Delete content of these sessions, or of all marked ones, up to a bound. Return how many have none left."""
        emptied = 0
        for _ in range(_BATCHES):
            part = await self._database.read(
                lambda found: ErasureRepository(found).to_empty(session_ids, _SESSIONS_AT_ONCE)
            )
            if not part:
                break
            # SQLite keeps deleted content in free pages and the log until it is scrubbed.
            self._scrubbing_due = True
            emptied += await self._database.commit(partial(_empty, part, self._clock()))
        await self.scrub_if_due()
        return emptied

    async def empty_all(self) -> bool:
        """Delete all content of marked sessions. Return whether SQLite's files are free of it as well: a reader may
        prevent that now."""
        while True:
            await self.empty()
            if not await self._database.read(lambda found: ErasureRepository(found).to_empty(None, 1)):
                return not self._scrubbing_due
            await asyncio.sleep(_PAUSE_SECONDS)

    async def scrub_if_due(self) -> None:
        """Scrub SQLite's files if this process deleted content since it last could, or has only begun."""
        if self._scrubbing_due:
            self._scrubbing_due = not await self._database.scrub()

    async def poll_marks(self) -> None:
        """Notify this process of sessions that other processes erased."""
        since = max(self._seen_marks.values(), default=self._clock()) - _OVERLAP_SECONDS
        rows = await self._database.read(lambda found: ErasureRepository(found).marked_since(since))
        new = [row for row in rows if row.id not in self._seen_marks]
        self._seen_marks = {row.id: row.erased_at for row in rows}
        requested = [row.id for row in new if row.erased_reason == ErasedReason.REQUESTED.value]
        self._notify([row.id for row in new], requested=requested)

    def _notify(self, session_ids: Sequence[str], *, requested: Sequence[str]) -> None:
        self._signals.erasures.notify(session_ids)
        self._signals.requested_erasures.notify(requested)


def _mark(session_ids: Sequence[str], reason: ErasedReason, by: str, now: float, connection: Connection) -> int:
    marked = ErasureRepository(connection).mark(session_ids, reason, now)
    if marked and reason is ErasedReason.REQUESTED:
        # The request empties what it can. The job does the rest, also if this process dies; the job of retention
        # empties what it marks itself.
        enqueue(connection, kind=EMPTYING, key=f"{session_ids[0]}@{now}", payload={}, now=now)
    for run_id, count in marked.items():
        data = {"count": count, "reason": reason.value, "by": by}
        append_event(connection, run_id=run_id, kind="sessions.erased", data=data, now=now)
    return sum(marked.values())


def _empty(session_ids: Sequence[str], now: float, connection: Connection) -> int:
    return ErasureRepository(connection).empty(session_ids, turns=_TURNS_AT_ONCE, now=now)
