"""Sessions: opened by agents or their runners, found for every model call, ended, swept."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import msgspec
from sqlalchemy.ext.asyncio import AsyncConnection

from proxy.clock import Clock
from proxy.contract.identifiers import GroupId, RunId, SessionId, new_session_id
from proxy.contract.trajectory import Purpose
from proxy.credentials.http import require
from proxy.credentials.service import Credentials, KeyRequest, Principal, PrincipalKind
from proxy.database.events import append_event
from proxy.database.lifecycle import (
    EndReason,
    Outcome,
    SessionState,
    TrainingState,
    end_session,
    end_sessions,
    settle,
)
from proxy.database.signals import Signals
from proxy.database.unit_of_work import Database
from proxy.errors import InvalidRequest, NotFound, PermissionDenied
from proxy.runs.service import RunDirectory, RunView
from proxy.sessions.identification import AttributedBy, SessionContext, SessionHints, checked_name, is_own_id
from proxy.sessions.repository import AnyRow, SessionRepository
from proxy.sessions.views import SessionView, session_view

_CACHED_SESSIONS = 8192
_SWEEP_BATCH = 500
_SWEEP_BATCHES = 20


class SessionSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A session to be opened. `ttl` is its idle time-out in seconds; the run's otherwise."""

    task: str | None = None
    group: str | None = None
    group_size: int | None = None
    purpose: Purpose = Purpose.TRAIN
    metadata: dict[str, Any] | None = None
    ttl: float | None = None


class CreatedSession(msgspec.Struct, frozen=True, kw_only=True):
    """`api_key` is shown this once."""

    id: SessionId
    api_key: str
    group_id: GroupId | None


class Swept(msgspec.Struct, frozen=True, kw_only=True):
    """How many sessions a sweep ended as idle, and how many expired unrewarded."""

    ended: int
    expired: int


class _Known(msgspec.Struct, frozen=True):
    context: SessionContext
    external_id: str | None


class SessionService:
    """Every model call goes through `identify`, so what never changes of a session is kept in memory."""

    def __init__(
        self, database: Database, runs: RunDirectory, credentials: Credentials, signals: Signals, clock: Clock
    ) -> None:
        self._database = database
        self._runs = runs
        self._credentials = credentials
        self._signals = signals
        self._clock = clock
        self._known: OrderedDict[tuple[str, str], _Known] = OrderedDict()

    async def create(self, run: RunView, spec: SessionSpec, n: int | None = None) -> list[CreatedSession]:
        """Opens a session with a key of its own; with `n` that many of one group, in one transaction.

        `n` sessions without a group's name make a group of their own. Raises InvalidRequest where the group is
        known with another size.
        """
        count = n or 1
        now = self._clock()
        async with self._database.write() as connection:
            repository = SessionRepository(connection)
            group_id = await self._group_for(repository, run, spec, n, now)
            rows = [
                _row(
                    run_id=run.id,
                    group_id=group_id,
                    attributed_by=AttributedBy.CREATED,
                    now=now,
                    task=spec.task,
                    purpose=spec.purpose,
                    metadata=spec.metadata,
                    idle_seconds=spec.ttl,
                )
                for _ in range(count)
            ]
            await repository.insert(rows)
            keys = await self._credentials.create_within(
                connection,
                [KeyRequest(kind=PrincipalKind.SESSION, run_id=run.id, session_id=row["id"]) for row in rows],
            )
        return [
            CreatedSession(id=row["id"], api_key=key.text, group_id=group_id)
            for row, key in zip(rows, keys, strict=True)
        ]

    async def identify(self, principal: Principal, run: RunView, hints: SessionHints) -> SessionContext:
        """The session that a model call belongs to; the first that applies of session key (a path must
        agree with it), path, header, conversation; else a new one.

        Raises PermissionDenied for a key of another run or session, NotFound for an unknown id of ours.
        """
        require(principal, PrincipalKind.RUN, PrincipalKind.SESSION)
        if principal.run_id != run.id:
            raise PermissionDenied(f"this key belongs to another run than {run.name!r}", param="model")
        if principal.session_id is not None:
            return await self._of_session_key(principal.session_id, run, hints)
        if hints.path_id is not None:
            return await self._named(run, hints.path_id, AttributedBy.PATH, hints.group)
        if hints.header_id is not None:
            return await self._named(run, hints.header_id, AttributedBy.HEADER, hints.group)
        if hints.conversation_hashes:
            async with self._database.read() as connection:
                session_id = await SessionRepository(connection).of_conversation(
                    run_id=run.id, key_id=principal.key_id, hashes=hints.conversation_hashes
                )
            if session_id is not None:
                known = await self._find(session_id, run.id)
                if known is not None:
                    return _attributed(known, AttributedBy.CONVERSATION)
        return await self._open(run, hints.group, AttributedBy.NEW, key_id=principal.key_id)

    async def get(self, principal: Principal, name: str) -> SessionView:
        """A session by our id or the client's own name. Raises NotFound, PermissionDenied."""
        session_id, _run_id = await self._visible(principal, name)
        async with self._database.read() as connection:
            return await _view(connection, session_id)

    async def end(self, principal: Principal, name: str, outcome: Outcome) -> SessionView:
        """Ends a session, once: of one that had ended, only a missing outcome is filled in.

        Raises NotFound, PermissionDenied.
        """
        session_id, run_id = await self._visible(principal, name)
        now = self._clock()
        weights = (await self._runs.settings_of(run_id)).reward_weights
        async with self._database.write() as connection:
            await end_session(connection, session_id, reason=EndReason.EXPLICIT, outcome=outcome, now=now)
            changed = await settle(connection, [session_id], reward_weights=weights, now=now)
            view = await _view(connection, session_id)
        if changed:
            self._signals.trajectories.notify()
        return view

    async def sweep(self) -> Swept:
        """Ends idle sessions and expires unrewarded ones, in bounded transactions."""
        ended = expired = 0
        for run in await self._runs.list_():
            for _ in range(_SWEEP_BATCHES):
                swept = await self._sweep_batch(run)
                ended += swept.ended
                expired += swept.expired
                if max(swept.ended, swept.expired) < _SWEEP_BATCH:
                    break
        if ended or expired:
            self._signals.trajectories.notify()
        if expired:
            self._signals.events.notify()
        return Swept(ended=ended, expired=expired)

    async def count_by_training(self) -> dict[tuple[str, str], int]:
        """(run name, training state) → sessions."""
        async with self._database.read() as connection:
            rows = await SessionRepository(connection).count_by_training()
        return {(row.name, row.training): row.sessions for row in rows}

    async def _sweep_batch(self, run: RunView) -> Swept:
        now = self._clock()
        settings = run.settings
        async with self._database.read() as connection:
            repository = SessionRepository(connection)
            idle = await repository.idle(
                run_id=run.id, default_seconds=settings.session_idle_seconds, now=now, limit=_SWEEP_BATCH
            )
            overdue = await repository.unrewarded(
                run_id=run.id, ended_before=now - settings.reward_timeout_seconds, limit=_SWEEP_BATCH
            )
        if not idle and not overdue:
            return Swept(ended=0, expired=0)
        async with self._database.write() as connection:
            ended = await end_sessions(connection, idle, reason=EndReason.IDLE, outcome=None, now=now)
            await settle(connection, idle, reward_weights=settings.reward_weights, now=now)
            expired = await SessionRepository(connection).expire(overdue) if overdue else 0
            if expired:
                await append_event(
                    connection, run_id=run.id, kind="session.expired", data={"count": expired}, now=now
                )
        return Swept(ended=ended, expired=expired)

    async def _group_for(
        self, repository: SessionRepository, run: RunView, spec: SessionSpec, n: int | None, now: float
    ) -> GroupId | None:
        size = spec.group_size or n
        if spec.group is None:
            if n is None or size is None or size < 2:
                return None
            return await repository.insert_group(run_id=run.id, name=None, size=size, now=now)
        known = await repository.group(run_id=run.id, name=spec.group)
        if known is None:
            return await repository.insert_group(run_id=run.id, name=spec.group, size=size, now=now)
        if known.size is None and size is not None:
            await repository.set_group_size(known.id, size)
        elif spec.group_size is not None and spec.group_size != known.size:
            raise InvalidRequest(
                f"the group {spec.group!r} is already known with the size {known.size}", param="group_size"
            )
        return GroupId(known.id)

    async def _of_session_key(self, session_id: SessionId, run: RunView, hints: SessionHints) -> SessionContext:
        known = await self._find(session_id, run.id)
        if known is None:
            raise NotFound("the session of this key is no longer there")
        if hints.path_id is None:
            return _attributed(known, AttributedBy.KEY)
        if hints.path_id not in (session_id, known.external_id):
            raise PermissionDenied(f"this key belongs to the session {session_id}, not to {hints.path_id!r}")
        return _attributed(known, AttributedBy.PATH)

    async def _named(self, run: RunView, name: str, by: AttributedBy, group: str | None) -> SessionContext:
        known = await self._find(checked_name(name, param="session"), run.id)
        if known is not None:
            return _attributed(known, by)
        if is_own_id(name):
            raise NotFound(f"there is no session {name!r} in the run {run.name!r}")
        return await self._open(run, group, by, external_id=name)

    async def _open(
        self,
        run: RunView,
        group: str | None,
        by: AttributedBy,
        *,
        external_id: str | None = None,
        key_id: str | None = None,
    ) -> SessionContext:
        """A session on its first call. Of calls that name it at the same time, one opens it."""
        now = self._clock()
        async with self._database.write() as connection:
            repository = SessionRepository(connection)
            row = await repository.context(name=external_id, run_id=run.id) if external_id is not None else None
            if row is None:
                group_id: GroupId | None = None
                if group is not None:
                    group = checked_name(group, param="group")
                    spec = SessionSpec(group=group)
                    group_id = await self._group_for(repository, run, spec, None, now)
                values = _row(
                    run_id=run.id,
                    group_id=group_id,
                    attributed_by=by,
                    now=now,
                    external_id=external_id,
                    key_id=key_id,
                )
                await repository.insert([values])
                row = await repository.context(name=values["id"], run_id=run.id)
        assert row is not None  # inserted or found in this transaction
        return _attributed(self._remember(row), by)

    async def _find(self, name: str, run_id: RunId) -> _Known | None:
        known = self._known.get((run_id, name))
        if known is not None:
            self._known.move_to_end((run_id, name))
            return known
        async with self._database.read() as connection:
            row = await SessionRepository(connection).context(name=name, run_id=run_id)
        return self._remember(row) if row is not None else None

    def _remember(self, row: AnyRow) -> _Known:
        context = SessionContext(
            id=row.id,
            run_id=row.run_id,
            purpose=Purpose(row.purpose),
            attributed_by=AttributedBy.CREATED,
            group_id=row.group_id,
        )
        known = _Known(context, row.external_id)
        for name in {row.id, row.external_id} - {None}:
            self._known[row.run_id, name] = known
        while len(self._known) > _CACHED_SESSIONS:
            self._known.popitem(last=False)
        return known

    async def _visible(self, principal: Principal, name: str) -> tuple[SessionId, RunId]:
        require(principal, PrincipalKind.ADMIN, PrincipalKind.RUN, PrincipalKind.SESSION)
        async with self._database.read() as connection:
            row = await SessionRepository(connection).context(name=name, run_id=principal.run_id)
        if principal.session_id is not None and (row is None or row.id != principal.session_id):
            raise PermissionDenied(f"this key belongs to the session {principal.session_id} alone")
        if row is None:
            raise NotFound(f"there is no session {name!r}")
        return SessionId(row.id), RunId(row.run_id)


async def _view(connection: AsyncConnection, session_id: str) -> SessionView:
    repository = SessionRepository(connection)
    return session_view(
        await repository.whole(session_id), await repository.turns(session_id), await repository.rewards(session_id)
    )


def _attributed(known: _Known, by: AttributedBy) -> SessionContext:
    return msgspec.structs.replace(known.context, attributed_by=by)


def _row(
    *,
    run_id: RunId,
    group_id: GroupId | None,
    attributed_by: AttributedBy,
    now: float,
    external_id: str | None = None,
    key_id: str | None = None,
    task: str | None = None,
    purpose: Purpose = Purpose.TRAIN,
    metadata: dict[str, Any] | None = None,
    idle_seconds: float | None = None,
) -> dict[str, Any]:
    """A new session, with every column that an insert of many needs."""
    return {
        "id": new_session_id(),
        "run_id": run_id,
        "external_id": external_id,
        "group_id": group_id,
        "key_id": key_id,
        "task": task,
        "purpose": purpose.value,
        "metadata": metadata,
        "attributed_by": attributed_by.value,
        "state": SessionState.OPEN.value,
        "training": (TrainingState.EXCLUDED if purpose is Purpose.EVAL else TrainingState.PENDING).value,
        "turn_count": 0,
        "idle_seconds": idle_seconds,
        "created_at": now,
        "last_active_at": now,
    }
