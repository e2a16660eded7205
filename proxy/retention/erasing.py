"""Erasure: the content of a session is deleted; that it existed and which versions learnt from it stays recorded.

A session is marked as erased first. From that commit on it accepts no calls and no rewards, no turn continues one of
its turns, and no claim contains it. Its content is deleted afterwards in small transactions: within the request if
there is little, else by a job enqueued with the mark, which also finishes what a killed process left. In-memory
copies are dropped once a process learns of the mark: this process at once, others on the same store when they poll
for marks, every second.
"""

from __future__ import annotations

import msgspec

from proxy.auth.service import Credentials
from proxy.clock import Clock
from proxy.contract.states import TrainingState
from proxy.database.unit_of_work import Database
from proxy.errors import InvalidRequest, NotFound
from proxy.lifecycle.signals import Signals
from proxy.retention.eraser import ErasureObserver, SessionEraser
from proxy.retention.repository import ErasedReason, ErasureRepository
from proxy.runs.service import RunDirectory


class ErasureTarget(msgspec.Struct, frozen=True, kw_only=True):
    """One session (by its id or the client's name) or all sessions of a user, within one run (a name or id) or
    all."""

    session: str | None = None
    user: str | None = None
    run: str | None = None


class LearntFrom(msgspec.Struct, frozen=True, kw_only=True):
    """A policy version that a step made from `sessions` of the erased sessions, or that was fitted to them."""

    run: str
    version: int
    sessions: int


class ErasureReport(msgspec.Struct, frozen=True, kw_only=True):
    """The result of an erasure.

    `sessions` is the number of matching sessions, `erased` how many of them this request erased, `turns` the number
    of their calls. `versions` learnt from them. `leased` sessions are in a trainer's claim: if its step commits, that
    version learns from them too. The content of `content_left` sessions is still to be deleted. With `dry_run`,
    nothing was changed.
    """

    sessions: int
    erased: int
    turns: int
    versions: tuple[LearntFrom, ...]
    leased: int
    content_left: int
    dry_run: bool = False


class EraseService(SessionEraser):
    """Erases sessions on request."""

    def __init__(
        self,
        database: Database,
        runs: RunDirectory,
        credentials: Credentials,
        signals: Signals,
        clock: Clock,
        observer: ErasureObserver | None = None,
    ) -> None:
        super().__init__(database, signals, clock, observer)
        self._runs = runs
        self._credentials = credentials

    async def erase(self, target: ErasureTarget, *, dry_run: bool = False) -> ErasureReport:
        """Erase the target's sessions and report on them. A repetition also erases what was recorded since.

        Raise InvalidRequest unless exactly one of session and user is given, NotFound for an unknown session or run.
        """
        session_ids = await self._find(target)
        by = "session" if target.user is None else "user"
        erased = 0
        if not dry_run:
            erased = await self.mark(session_ids, ErasedReason.REQUESTED, by=by)
            await self.empty(session_ids)
        rows = await self._database.read(lambda found: ErasureRepository(found).account(session_ids))
        fitted = await self._database.read(lambda found: ErasureRepository(found).fitted_to(session_ids))
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

    async def _find(self, target: ErasureTarget) -> list[str]:
        if (target.session is None) == (target.user is None):
            raise InvalidRequest("give either session or user, not both", param="session")
        run_id = (await self._runs.by_name_or_id(target.run)).id if target.run is not None else None
        if target.user is not None:
            digest = self._credentials.pseudonym(target.user.strip())
            return await self._database.read(lambda found: ErasureRepository(found).of_user(digest, run_id=run_id))
        name = str(target.session)
        session_ids = await self._database.read(lambda found: ErasureRepository(found).named(name, run_id=run_id))
        if not session_ids:
            raise NotFound(
                f"there is no session {name!r}; an erased session is found only by its id", param="session"
            )
        return session_ids
