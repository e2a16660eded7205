"""Reads the event log of all runs in pages."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import Connection

from proxy.database.rows import AnyRow
from proxy.database.unit_of_work import Database
from proxy.errors import InvalidRequest
from proxy.overview.filters import page_size
from proxy.overview.log.repository import EventLogRepository
from proxy.overview.log.views import EventFilter, EventPage, LoggedEvent

# How many events a page searches: no index finds those of a kind, and a rare one must not cost a walk over the log.
_SEARCHED = 20_000
# More digits than any id of a 64-bit column has.
_MOST_DIGITS = 19


class EventLog:
    """Reads pages of the event log, newest events first."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def page(self, wanted: EventFilter, *, cursor: str | None = None, limit: int = 50) -> EventPage:
        """Return a page of matching events. Raise InvalidRequest for an invalid cursor."""
        before = None if cursor is None else _event_id(cursor)
        size = page_size(limit)

        def read(connection: Connection) -> tuple[int, Sequence[AnyRow]]:
            repository = EventLogRepository(connection)
            below = repository.newest_id() + 1 if before is None else before
            after = max(0, below - 1 - _SEARCHED)
            return after, repository.between(wanted, after=after, below=below, limit=size + 1)

        after, rows = await self._database.read(read)
        following = rows[size - 1].id if len(rows) > size else after + 1 if after else None
        return EventPage(
            events=tuple(
                LoggedEvent(
                    id=row.id, kind=row.kind, run_id=row.run_id, run=row.run, data=row.data, created_at=row.created_at
                )
                for row in rows[:size]
            ),
            next_cursor=None if following is None else str(following),
        )


def _event_id(cursor: str) -> int:
    if not (cursor.isascii() and cursor.isdecimal() and len(cursor) <= _MOST_DIGITS and int(cursor) < 1 << 63):
        raise InvalidRequest("invalid cursor: take `next_cursor` of the previous page", param="cursor")
    return int(cursor)
