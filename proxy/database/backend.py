"""What the store needs of a database, whichever it is."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection

from proxy.database.integrity import Integrity


class BlockSource(Protocol):
    """Opens blocks; SQLAlchemy's `AsyncEngine` is one."""

    def begin(self) -> AbstractAsyncContextManager[AsyncConnection]:
        """A transaction that is committed at the end of the block and rolled back on any exception."""

    def connect(self) -> AbstractAsyncContextManager[AsyncConnection]:
        """A transaction for reading."""

    async def dispose(self) -> None:
        """Close idle connections."""


@dataclass(frozen=True, kw_only=True)
class Backend:
    """Four uses of connections: `writer` and `reader` for blocks, `transaction` and `look` for functions. What a
    reading connection sees in one transaction is one committed state.

    `lanes`: how many transactions may be under way at once. `one_writer`: blocks and functions may not write at the
    same time. `is_unavailable` and `may_do_again` judge errors: whether the database can do nothing now, and whether
    the same transaction, begun anew, may well succeed. `reason` is an error in words for agents: without the
    database's address, its role or its files.
    """

    writer: BlockSource
    reader: BlockSource
    transaction: Callable[[Callable[[Connection], Any]], asyncio.Future[Any]]
    look: Callable[[Callable[[Connection], Any]], Awaitable[Any]]
    lanes: int
    one_writer: bool
    is_unavailable: Callable[[DBAPIError], bool]
    may_do_again: Callable[[BaseException], bool]
    reason: Callable[[DBAPIError], str]
    close: Callable[[], None]
    """Waits for the functions that were asked for, and closes their connections."""
    integrity: Integrity | None = None
    """None on PostgreSQL, which checks its pages itself (data checksums)."""

    async def aclose(self) -> None:
        """Wait for all work that was asked for."""
        self.close()
        if self.integrity is not None:
            self.integrity.close()
        await self.writer.dispose()
        await self.reader.dispose()
