"""The queries of the event log."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import Connection, func, or_, select

from proxy.database.rows import AnyRow
from proxy.database.tables import EventRow, RunRow
from proxy.overview.log.views import EventFilter


class EventLogRepository:
    """Queries that run within one read transaction."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def newest_id(self) -> int:
        """Return the id of the newest event; 0 without events."""
        return int(self._connection.execute(select(func.coalesce(func.max(EventRow.id), 0))).scalar_one())

    def between(self, wanted: EventFilter, *, after: int, below: int, limit: int) -> Sequence[AnyRow]:
        """Return the newest matching events with ids in this range, newest first, with the names of their runs."""
        statement = (
            select(EventRow.__table__, RunRow.name.label("run"))
            .outerjoin(RunRow, RunRow.id == EventRow.run_id)
            .where(EventRow.id > after, EventRow.id < below)
        )
        if wanted.run_ids is not None:
            statement = statement.where(EventRow.run_id.in_(wanted.run_ids))
        if wanted.kind is not None:
            domain = EventRow.kind.startswith(f"{wanted.kind}.", autoescape=True)
            statement = statement.where(or_(EventRow.kind == wanted.kind, domain))
        return self._connection.execute(statement.order_by(EventRow.id.desc()).limit(limit)).all()
