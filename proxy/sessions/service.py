"""Sessions: opened by agents or their runners, found for every model call, ended, swept."""

from __future__ import annotations

from typing import Any

import msgspec
from sqlalchemy import Connection

from proxy.auth.access import Principal, PrincipalKind, Right, covers, require_right
from proxy.auth.service import Credentials, KeyRequest, NewKey
from proxy.clock import Clock
from proxy.contract.identifiers import GroupId, KeyId, SessionId
from proxy.contract.states import EndReason, Outcome
from proxy.contract.trajectory import Purpose
from proxy.database.unit_of_work import Database
from proxy.errors import Conflict, NotFound, PermissionDenied, StoreUnavailable
from proxy.lifecycle.audits import session_audit
from proxy.lifecycle.lifecycle import settle
from proxy.lifecycle.outcomes import Ending
from proxy.lifecycle.signals import Signals
from proxy.lifecycle.texts import texts_of
from proxy.lifecycle.trainable import teaching_sessions
from proxy.limits.service import Limits
from proxy.runs.service import RunDirectory, RunView
from proxy.sessions.finding import SessionFinder, SessionObserver
from proxy.sessions.identification import AttributedBy, SessionContext
from proxy.sessions.opening import (
    SessionSpec,
    group_for,
    new_row,
)
from proxy.sessions.repository import SessionRepository
from proxy.sessions.sweep_repository import SweepRepository
from proxy.sessions.sweeping import Sweeper, Swept
from proxy.sessions.view_repository import SessionViewRepository
from proxy.sessions.views import SessionView, session_view

# Bounds the answer: a name may have thousands of attempts.
_ATTEMPTS_SHOWN = 100


class CreatedSession(msgspec.Struct, frozen=True, kw_only=True):
    """A session that was opened for a client. `api_key` is shown only now."""

    id: SessionId
    api_key: str
    group_id: GroupId | None


class SessionService(SessionFinder):
    """The life of sessions. Finding the session of a model call is the inherited part."""

    def __init__(
        self,
        database: Database,
        runs: RunDirectory,
        credentials: Credentials,
        signals: Signals,
        clock: Clock,
        observer: SessionObserver | None = None,
        limits: Limits | None = None,
    ) -> None:
        super().__init__(database, credentials, signals, clock, observer)
        self._signals = signals
        self._limits = limits
        self._runs = runs
        self._sweeper = Sweeper(database, runs, signals, clock)

    async def create(
        self, run: RunView, spec: SessionSpec, n: int | None = None, *, limited_as: KeyId | None = None
    ) -> list[CreatedSession]:
        """Open a session with a key of its own; with `n`, that many sessions of one group in one transaction.

        The limits of the key `limited_as` bind the keys of the sessions.

        `n` sessions without a group's name form a group of their own. Raise InvalidRequest if the group is known with
        another size, TrainerBehind if the run currently opens no sessions for training.
        """
        if self._limits is not None and spec.purpose is Purpose.TRAIN:
            await self._limits.check_waiting(run)
        now = self._clock()
        users = self.users_of({"metadata": spec.metadata})

        def insert(connection: Connection) -> tuple[list[dict[str, Any]], list[NewKey]]:
            repository = SessionRepository(connection)
            group_id = group_for(repository, run, spec, n, now)
            rows = [
                new_row(
                    run_id=run.id,
                    group_id=group_id,
                    attributed_by=AttributedBy.CREATED,
                    now=now,
                    task=spec.task,
                    purpose=spec.purpose,
                    metadata=spec.metadata,
                    idle_seconds=spec.ttl,
                )
                for _ in range(n or 1)
            ]
            repository.insert(rows)
            repository.add_users(run.id, [row["id"] for row in rows], users)
            keys = [
                KeyRequest(kind=PrincipalKind.SESSION, run_id=run.id, session_id=row["id"], limited_as=limited_as)
                for row in rows
            ]
            return rows, self._credentials.create_within(connection, keys)

        rows, keys = await self._database.commit(insert)
        if self._observer is not None:
            for _ in rows:
                self._observer.session_opened(attributed_by=AttributedBy.CREATED.value, attempt=1)
        return [
            CreatedSession(id=row["id"], api_key=key.text, group_id=row["group_id"])
            for row, key in zip(rows, keys, strict=True)
        ]

    async def discard(self, session: SessionContext) -> bool:
        """Delete a session whose opening call recorded nothing, and return whether it is deleted.

        It stays if the store is unavailable, and the sweep ends it later.
        """
        try:
            is_gone = await self._database.commit(
                lambda connection: SessionRepository(connection).delete_empty(session.id), order_key=session.id
            )
        except (Conflict, StoreUnavailable):
            return False
        if is_gone:
            self._memory.erase([session.id])
            if session.group_id is not None:  # the group may be complete without it, and claimable
                self._signals.trajectories.notify()
        return is_gone

    async def get(self, principal: Principal, name: str) -> SessionView:
        """Return a session by our id or the client's own name. Raise NotFound or PermissionDenied."""
        session_id = await self._visible(principal, name, Right.READ_SESSION)
        return await self._database.read(lambda connection: _view(connection, session_id))

    async def end(self, principal: Principal, name: str, outcome: Outcome) -> SessionView:
        """End a session and return its view. If it has already ended, only a missing outcome is filled in.

        Raise NotFound or PermissionDenied.
        """
        session_id = await self._visible(principal, name, Right.REWARD)
        now = self._clock()

        def end(connection: Connection) -> tuple[list[str], SessionView]:
            ending = Ending(EndReason.EXPLICIT, outcome)
            settled = settle(connection, (), now=now, endings={session_id: ending})
            return settled.changed, _view(connection, session_id)

        changed, view = await self._database.commit(end, order_key=session_id)
        self._signals.endings.notify([session_id])
        if changed:
            self._signals.trajectories.notify()
        return view

    async def sweep(self) -> Swept:
        """End idle sessions and expire unrewarded ones."""
        return await self._sweeper.sweep()

    async def count_revised(self) -> dict[str, int]:
        """Return for each run, by name, the number of trained sessions whose rewards have changed since."""
        rows = await self._database.read(lambda connection: SweepRepository(connection).count_revised())
        return {row.name: row.sessions for row in rows}

    async def _visible(self, principal: Principal, name: str, right: Right) -> SessionId:
        require_right(principal, right)
        row = await self._database.read(
            lambda connection: SessionRepository(connection).context(name=name, run_id=principal.run_id)
        )
        if principal.session_id is not None and (row is None or row.id != principal.session_id):
            raise PermissionDenied(f"this key belongs to the session {principal.session_id} alone")
        # Keys of a project find sessions by id only, as admin keys do: a client's own name belongs to one run.
        if row is None or not covers(principal, await self._runs.by_id(row.run_id)):
            raise NotFound(f"there is no session {name!r}")
        return SessionId(row.id)


def _view(connection: Connection, session_id: str) -> SessionView:
    repository = SessionViewRepository(connection)
    row = repository.whole(session_id)
    named = row.external_id is not None
    return session_view(
        row,
        repository.turns(session_id),
        repository.rewards(session_id),
        texts_of(connection, [session_id]).get(session_id, ()),
        repository.preferences(session_id),
        repository.attempts(row.run_id, row.external_id, _ATTEMPTS_SHOWN) if named else (),
        teaches=bool(teaching_sessions(connection, [session_id])),
        audit=session_audit(connection, row.run_id, row.consumed_by, session_id),
    )
