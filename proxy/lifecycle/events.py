"""The event log, appended in the transaction that makes the change it reports."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, func, insert, select

from proxy.database.tables import EventRow

# The PostgreSQL advisory lock that a transaction holds from its first event to its commit. The number is "events" in
# ASCII, so that it cannot clash with a lock of the migrations.
_APPEND_LOCK = 0x6576_656E_7473


def append_event(connection: Connection, *, run_id: str | None, kind: str, data: dict[str, Any], now: float) -> None:
    """Append an event. `kind` is `domain.what_happened`, such as `version.committed`; `data` is JSON.

    Call it late in a transaction: on PostgreSQL, transactions that append events wait for each other until they end.
    """
    # Ids must be in the order of commits, so that a reader who has seen one id has seen every event before it.
    # SQLite has one writer at a time; on PostgreSQL a later id could be committed first without this lock.
    if connection.dialect.name == "postgresql":
        connection.execute(select(func.pg_advisory_xact_lock(_APPEND_LOCK))).close()
    connection.execute(insert(EventRow).values(run_id=run_id, kind=kind, data=data, created_at=now))
