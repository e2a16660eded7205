"""Erasing: what sessions said goes, that they were there and who learnt from them stays.

A session is marked first: from that commit on it takes no calls and no rewards, is nobody's parent and is handed to
no trainer. Its content follows in small transactions, at once where it is little, else by the sweep, which also goes
on where a process died. What processes hold in memory they forget when they hear of the mark: this one at once,
others on the same store by looking for marks every second.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Protocol

import msgspec
from sqlalchemy import Connection

from proxy.auth.service import Credentials
from proxy.clock import Clock
from proxy.contract.states import TrainingState
from proxy.database.unit_of_work import Database
from proxy.errors import InvalidRequest, NotFound
from proxy.lifecycle.events import append_event
from proxy.lifecycle.signals import Signals
from proxy.retention.repository import ErasedReason, KeepingRepository
from proxy.runs.service import RunDirectory

_SESSIONS_AT_ONCE = 64
_TURNS_AT_ONCE = 200
"""Emptied in one transaction, which other writes wait for."""
_BATCHES = 20
"""So many transactions at most before an answer, and in a sweep."""
_OVERLAP_SECONDS = 60.0
"""How far back marks are looked for again: clocks of proxies differ, and commits come after their times."""


class ErasureTarget(msgspec.Struct, frozen=True, kw_only=True):
    """One session by our id or the client's name, or all of a user; of one run (a name or id) or of every run."""

    session: str | None = None
    user: str | None = None
    run: str | None = None


class LearntFrom(msgspec.Struct, frozen=True, kw_only=True):
    """A policy version whose training step consumed so many of the sessions, or that was fitted to them."""

    run: str
    version: int
    sessions: int


class ErasureReport(msgspec.Struct, frozen=True, kw_only=True):
    """`sessions` were found, `erased` of them by this very request, `turns` calls were made in them. `leased` are in
    a trainer's hands: should its step commit, its version will be one more that learnt from them. Of
    `content_left` sessions the content is still being removed. With `dry_run`, nothing was done."""

    sessions: int
    erased: int
    turns: int
    versions: tuple[LearntFrom, ...]
    leased: int
    content_left: int
    dry_run: bool = False


class ErasureObserver(Protocol):
    """Hears of erased sessions after the commit: metrics. It must not raise and not wait."""

    def sessions_erased(self, sessions: int, *, reason: str) -> None: ...


class EraseService:
    """Erases on request, empties what is marked, and hears of the marks of other processes."""

    def __init__(
        self,
        database: Database,
        runs: RunDirectory,
        credentials: Credentials,
        signals: Signals,
        clock: Clock,
        observer: ErasureObserver | None = None,
    ) -> None:
        self._database = database
        self._runs = runs
        self._credentials = credentials
        self._signals = signals
        self._clock = clock
        self._observer = observer
        self._heard: dict[str, float] = {}
        self._scrubbing_due = True

    async def erase(self, target: ErasureTarget, *, dry_run: bool = False) -> ErasureReport:
        """Again: the same answer, and what the user has said since is erased too. Raises InvalidRequest unless one of
        session and user is named, NotFound for a session or run that is not there."""
        session_ids = await self._find(target)
        by = "session" if target.user is None else "user"
        erased = 0
        if not dry_run:
            erased = await self.mark(session_ids, ErasedReason.REQUESTED, by=by)
            await self.empty(session_ids)
        rows = await self._database.read(lambda found: KeepingRepository(found).account(session_ids))
        fitted = await self._database.read(lambda found: KeepingRepository(found).fitted_to(session_ids))
        learnt: dict[tuple[str, int], int] = {(run, version): count for run, version, count in fitted}
        for row in rows:
            if row.consumed_by is not None:
                learnt[row.run, row.consumed_by] = learnt.get((row.run, row.consumed_by), 0) + row.sessions
        return ErasureReport(
            sessions=sum(row.sessions for row in rows),
            erased=sum(row.sessions - row.erased for row in rows) if dry_run else erased,
            turns=sum(row.turns for row in rows),
            versions=tuple(
                LearntFrom(run=run, version=version, sessions=sessions)
                for (run, version), sessions in sorted(learnt.items())
            ),
            leased=sum(row.sessions for row in rows if row.training == TrainingState.LEASED),
            content_left=sum(row.with_content for row in rows),
            dry_run=dry_run,
        )

    async def mark(self, session_ids: Sequence[str], reason: ErasedReason, *, by: str) -> int:
        """Erases but for the content; how many were not erased yet."""
        if not session_ids:
            return 0
        now = self._clock()
        marked = await self._database.commit(partial(_mark, session_ids, reason, by, now))
        if marked:
            self._signals.trajectories.notify()
            self._signals.events.notify()
            if self._observer is not None:
                self._observer.sessions_erased(marked, reason=reason.value)
        self._tell(session_ids, requested=session_ids if reason is ErasedReason.REQUESTED else ())
        return marked

    async def empty(self, session_ids: Sequence[str] | None = None) -> int:
        """Removes content of these sessions, or of all that are marked, up to a bound; how many have none left."""
        emptied = 0
        for _ in range(_BATCHES):
            part = await self._database.read(
                lambda found: KeepingRepository(found).to_empty(session_ids, _SESSIONS_AT_ONCE)
            )
            if not part:
                break
            self._scrubbing_due = True
            emptied += await self._database.commit(partial(_empty, part, self._clock()))
        if self._scrubbing_due:
            self._scrubbing_due = not await self._database.scrub()
        return emptied

    async def listen(self) -> None:
        """Tells this process of sessions that others erased."""
        since = max(self._heard.values(), default=self._clock()) - _OVERLAP_SECONDS
        rows = await self._database.read(lambda found: KeepingRepository(found).marked_since(since))
        new = [row for row in rows if row.id not in self._heard]
        self._heard = {row.id: row.erased_at for row in rows}
        requested = [row.id for row in new if row.erased_reason == ErasedReason.REQUESTED.value]
        self._tell([row.id for row in new], requested=requested)

    def _tell(self, session_ids: Sequence[str], *, requested: Sequence[str]) -> None:
        self._signals.erasures.notify(session_ids)
        self._signals.requested_erasures.notify(requested)

    async def _find(self, target: ErasureTarget) -> list[str]:
        if (target.session is None) == (target.user is None):
            raise InvalidRequest("name a session or a user, one of them", param="session")
        run_id = (await self._runs.by_name_or_id(target.run)).id if target.run is not None else None
        if target.user is not None:
            digest = self._credentials.pseudonym(target.user.strip())
            return await self._database.read(lambda found: KeepingRepository(found).of_user(digest, run_id=run_id))
        name = str(target.session)
        session_ids = await self._database.read(lambda found: KeepingRepository(found).named(name, run_id=run_id))
        if not session_ids:
            raise NotFound(f"there is no session {name!r}; an erased one is found by its id alone", param="session")
        return session_ids


def _mark(session_ids: Sequence[str], reason: ErasedReason, by: str, now: float, connection: Connection) -> int:
    marked = KeepingRepository(connection).mark(session_ids, reason, now)
    for run_id, count in marked.items():
        data = {"count": count, "reason": reason.value, "by": by}
        append_event(connection, run_id=run_id, kind="sessions.erased", data=data, now=now)
    return sum(marked.values())


def _empty(session_ids: Sequence[str], now: float, connection: Connection) -> int:
    return KeepingRepository(connection).empty(session_ids, turns=_TURNS_AT_ONCE, now=now)
