"""Recorded turns as clients see them: the request, the answer, and the conversation before them."""

from __future__ import annotations

from typing import Any

import msgspec

from proxy.contract.identifiers import RunId, SessionId, TurnId
from proxy.contract.turn import TurnState
from proxy.database.rows import AnyRow
from proxy.database.unit_of_work import Database
from proxy.turns.conversations_repository import CONTINUES, ConversationRepository


class RecordedTurn(msgspec.Struct, frozen=True, kw_only=True):
    """A turn as it was recorded.

    `messages` are those that the call added to the conversation of the turn `continues`, or the whole conversation if
    that is None. `request` is the body without them, `response` the answer as it was sent.
    """

    id: TurnId
    run_id: RunId
    session_id: SessionId
    state: TurnState
    continues: TurnId | None
    messages: list[dict[str, Any]]
    request: dict[str, Any]
    response: dict[str, Any]


class Exchange(msgspec.Struct, frozen=True, kw_only=True):
    """The messages that one turn added to its conversation, and the answer."""

    messages: list[dict[str, Any]]
    response: dict[str, Any]


class Conversations:
    """Reads recorded turns, of all proxies on this store."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def turn(self, turn_id: str) -> RecordedTurn | None:
        row = await self._database.read(lambda connection: ConversationRepository(connection).turn(turn_id))
        if row is None:
            return None
        return RecordedTurn(
            id=TurnId(row.id),
            run_id=RunId(row.run_id),
            session_id=SessionId(row.session_id),
            state=TurnState(row.state),
            continues=TurnId(row.parent_id) if row.continuation in CONTINUES else None,
            messages=row.messages,
            request=row.request,
            response=row.response,
        )

    async def up_to(self, turn_id: str) -> list[Exchange]:
        """Return the exchanges of the conversation that ends with this turn's answer, oldest first; none for an
        unknown turn."""
        rows = await self._database.read(lambda connection: ConversationRepository(connection).lineage(turn_id))
        return [Exchange(messages=row.messages, response=row.response) for row in _oldest_first(turn_id, rows)]


def _oldest_first(turn_id: str, rows: list[AnyRow]) -> list[AnyRow]:
    by_id = {row.id: row for row in rows}
    line = []
    step: str | None = turn_id
    while step is not None and step in by_id:
        line.append(by_id[step])
        step = by_id[step].parent_id
    return line[::-1]
