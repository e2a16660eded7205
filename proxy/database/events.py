"""The event log, appended in the transaction of what it tells."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Insert, insert
from sqlalchemy.ext.asyncio import AsyncConnection

from proxy.database.tables import EventRow


def event_row(*, run_id: str | None, kind: str, data: dict[str, Any], now: float) -> Insert:
    """For a function of a connection; see `append_event`."""
    return insert(EventRow).values(run_id=run_id, kind=kind, data=data, created_at=now)


async def append_event(
    connection: AsyncConnection, *, run_id: str | None, kind: str, data: dict[str, Any], now: float
) -> None:
    """`kind` is `domain.what_happened`, such as `version.committed`; `data` is JSON for people and programs."""
    await connection.execute(event_row(run_id=run_id, kind=kind, data=data, now=now))
