"""Sessions that are read from the store into this process's memory."""

from __future__ import annotations

from collections.abc import Sequence

from proxy.contract.identifiers import KeyId, RunId, SessionId, TurnId
from proxy.contract.states import SessionState
from proxy.contract.trajectory import Purpose
from proxy.database.rows import AnyRow
from proxy.database.unit_of_work import Database
from proxy.sessions.identification import AttributedBy, SessionContext
from proxy.sessions.memory import AsOf, KnownSession, SessionMemory
from proxy.sessions.opening import erased
from proxy.sessions.repository import ContextRow, SessionRepository


class StoredSessions:
    """Reads sessions and caches each in `memory`, as of the moment before the query: what changes during a query must
    not count as read."""

    def __init__(self, database: Database, memory: SessionMemory) -> None:
        self._database = database
        self._memory = memory

    async def read_named(self, run_id: RunId, name: str) -> KnownSession | None:
        """Read the session of this id or name. Raise Gone if it was erased."""
        as_of = self._memory.as_of_now()
        row = await self._database.read(
            lambda connection: SessionRepository(connection).context(name=name, run_id=run_id)
        )
        if row is None:
            return None
        if row.erased_at is not None:
            raise erased(row.id)
        self._memory.put_name(run_id, name, row.id, as_of)
        return self.remember(row, as_of)

    async def read_turns(self, run_id: RunId, turn_ids: Sequence[TurnId]) -> dict[TurnId, KnownSession]:
        """Read the sessions of these turns, by turn; turns of other runs and unknown ones are omitted."""
        as_of = self._memory.as_of_now()
        rows = await self._database.read(
            lambda connection: SessionRepository(connection).of_turns(run_id=run_id, turn_ids=turn_ids)
        )
        found = {TurnId(turn_id): self.remember(row, as_of) for turn_id, row in rows.items()}
        for turn_id, known in found.items():
            self._memory.put_turn(turn_id, known.context.id)
        return found

    async def read_conversation(
        self, run_id: RunId, key_id: KeyId, hashes: Sequence[bytes]
    ) -> tuple[bytes, KnownSession] | None:
        """Read from the store the sessions that hold the longest of these conversations. Return its hash and the
        first session, or None if no session holds any."""
        as_of = self._memory.as_of_now()
        rows = await self._database.read(
            lambda connection: SessionRepository(connection).of_conversation(
                run_id=run_id, key_id=key_id, hashes=hashes
            )
        )
        if not rows:
            return None
        times: dict[SessionId, int] = {}
        for row in rows:
            times[row.id] = times.get(row.id, 0) + row.times
            self.remember(row, as_of)
        held = rows[0].held
        self._memory.put_conversation(key_id, held, times, exact={row.id for row in rows if row.exact})
        return held, self.remember(rows[0], as_of)

    async def refresh(self, run_id: RunId, key_id: KeyId, held: bytes) -> bool:
        """Read the sessions that are known to hold a conversation, and return whether the store still has any."""
        as_of = self._memory.as_of_now()
        session_ids = self._memory.holders(key_id, held)
        if not session_ids:
            return False
        rows = await self._database.read(
            lambda connection: SessionRepository(connection).contexts(run_id=run_id, session_ids=session_ids)
        )
        for row in rows:
            self.remember(row, as_of)
        newest_first = sorted((row.id for row in rows), reverse=True)  # ids sort by the time of creation
        self._memory.put_conversation(key_id, held, dict.fromkeys(newest_first, 0), exact=newest_first)
        return bool(rows)

    def remember(self, row: AnyRow | ContextRow, as_of: AsOf) -> KnownSession:
        """Cache a session whose row was read after `as_of`."""
        context = SessionContext(
            id=row.id,
            run_id=row.run_id,
            purpose=Purpose(row.purpose),
            attributed_by=AttributedBy.CREATED,
            group_id=row.group_id,
            key_id=row.key_id,
            attempt=row.attempt if row.external_id is not None else None,
        )
        is_open = row.state == SessionState.OPEN.value
        return self._memory.put(context, external_id=row.external_id, is_open=is_open, as_of=as_of)
