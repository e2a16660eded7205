"""The event log, appended in the transaction of what it tells."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, func, insert, select
from sqlalchemy.ext.asyncio import AsyncConnection

from proxy.database.tables import EventRow

_IN_TURN = 0x6576_656E_7473
"""The advisory lock of who appends on PostgreSQL."""


async def append_event(
    connection: AsyncConnection, *, run_id: str | None, kind: str, data: dict[str, Any], now: float
) -> None:
    """`kind` is `domain.what_happened`, such as `version.committed`; `data` is JSON for people and programs."""
    await connection.run_sync(add_event, run_id=run_id, kind=kind, data=data, now=now)


def add_event(connection: Connection, *, run_id: str | None, kind: str, data: dict[str, Any], now: float) -> None:
    """For a function of a connection; see `append_event`. To be called late in a transaction.

    Ids are in the order of commits: who has read up to one has seen all before it. SQLite has one writer anyway; on
    PostgreSQL, transactions that append come one after the other.
    """
    if connection.dialect.name == "postgresql":
        connection.execute(select(func.pg_advisory_xact_lock(_IN_TURN))).close()
    connection.execute(insert(EventRow).values(run_id=run_id, kind=kind, data=data, created_at=now))
