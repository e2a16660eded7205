from __future__ import annotations

import asyncio
import threading

from sqlalchemy import Connection, select

from proxy.database.tables import EventRow
from proxy.database.unit_of_work import Database
from proxy.lifecycle.events import append_event
from tests.database import needs_postgresql, postgresql_database


def kinds(connection: Connection) -> list[str]:
    return list(connection.execute(select(EventRow.kind).order_by(EventRow.id)).scalars())


@needs_postgresql
async def test_event_ids_are_in_the_order_of_commits() -> None:
    """The second of two transactions that append waits for the first to commit, so a smaller id never appears
    later."""
    with postgresql_database() as url:
        first, second = Database(url), Database(url)
        appended, looked = threading.Event(), threading.Event()

        def slow(connection: Connection) -> None:
            append_event(connection, run_id=None, kind="slow", data={}, now=0.0)
            appended.set()
            looked.wait(10)

        def quick(connection: Connection) -> None:
            append_event(connection, run_id=None, kind="quick", data={}, now=0.0)

        try:
            appending = asyncio.create_task(first.commit(slow))
            assert await asyncio.to_thread(appended.wait, 10)
            following = asyncio.create_task(second.commit(quick))
            done, _ = await asyncio.wait((following,), timeout=0.2)
            assert not done
            assert await second.read(kinds) == []
            looked.set()
            await asyncio.gather(appending, following)
            assert await second.read(kinds) == ["slow", "quick"]
        finally:
            looked.set()
            await first.aclose()
            await second.aclose()
