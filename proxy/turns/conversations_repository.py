"""Queries that read conversations from turns."""

from __future__ import annotations

from sqlalchemy import Connection, bindparam, select

from proxy.contract.turn import Continuation
from proxy.database.rows import AnyRow
from proxy.database.tables import SessionRow, TurnRow
from proxy.lifecycle.turn_requests import request_as_sent

# Continuations of turns that store only the messages added to the parent's conversation; others store all of them.
CONTINUES = (Continuation.EXACT.value, Continuation.RETEMPLATED.value)


class ConversationRepository:
    """Reads within one transaction."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def turn(self, turn_id: str) -> AnyRow | None:
        return self._connection.execute(_TURN, {"id": turn_id}).one_or_none()

    def lineage(self, turn_id: str) -> list[AnyRow]:
        """Return the turn and the ancestors whose conversation it continues, in no particular order."""
        return list(self._connection.execute(_LINEAGE, {"id": turn_id}))


_TURN = (
    select(
        TurnRow.id,
        TurnRow.run_id,
        TurnRow.session_id,
        TurnRow.state,
        TurnRow.parent_id,
        TurnRow.continuation,
        TurnRow.messages,
        request_as_sent(),
        TurnRow.response,
    )
    .join(SessionRow, SessionRow.id == TurnRow.session_id)
    .where(TurnRow.id == bindparam("id"), SessionRow.erased_at.is_(None))
)

_COLUMNS = (TurnRow.id, TurnRow.parent_id, TurnRow.continuation)

_LINE = select(*_COLUMNS).where(TurnRow.id == bindparam("id")).cte("line", recursive=True)
_LINE = _LINE.union(
    select(*_COLUMNS).join(_LINE, TurnRow.id == _LINE.c.parent_id).where(_LINE.c.continuation.in_(CONTINUES))
)

_LINEAGE = select(*_COLUMNS, TurnRow.messages, TurnRow.response).join(_LINE, TurnRow.id == _LINE.c.id)
