"""What the store needs of a database, whichever it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine

from proxy.database.integrity import Integrity
from proxy.database.threads import ConnectionThreads

READERS = 4
"""Connections that read at once."""


@dataclass(frozen=True, kw_only=True)
class Backend:
    """Connections of four uses: `writer` and `reader` for blocks, the threads for functions. What a reading
    connection sees in one transaction is one committed state.

    `one_writer`: blocks and functions may not write at the same time. `is_unavailable` and `may_do_again` judge
    errors: whether the database can do nothing now, and whether the same transaction, begun anew, may well succeed.
    """

    writer: AsyncEngine
    reader: AsyncEngine
    write_threads: ConnectionThreads
    read_threads: ConnectionThreads
    one_writer: bool
    is_unavailable: Callable[[DBAPIError], bool]
    may_do_again: Callable[[BaseException], bool]
    close: Callable[[], None] | None = None
    """Closes what else the backend holds open."""
    integrity: Integrity | None = None
    """None on PostgreSQL, which checks its pages itself (data checksums)."""

    async def aclose(self) -> None:
        """Waits for what was asked of it."""
        self.write_threads.close()
        self.read_threads.close()
        if self.integrity is not None:
            self.integrity.close()
        if self.close is not None:
            self.close()
        await self.writer.dispose()
        await self.reader.dispose()
