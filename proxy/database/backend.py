"""The operations that SQLite and PostgreSQL each provide to the store."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from proxy.database.integrity import Integrity


@dataclass(frozen=True, kw_only=True)
class Backend:
    """A database behind two operations: `write` runs a function in a read-write transaction and commits it, `read`
    runs one in a read-only transaction that sees a single committed state."""

    write: Callable[[Callable[[Connection], Any]], asyncio.Future[Any]]
    read: Callable[[Callable[[Connection], Any]], Awaitable[Any]]
    lanes: int
    """The number of write transactions that may run at the same time."""
    is_unavailable: Callable[[DBAPIError], bool]
    """Return whether the error means that the database can do nothing now, though it is no OperationalError."""
    may_retry: Callable[[BaseException], bool]
    """Return whether the same transaction, begun again, may succeed."""
    reason: Callable[[DBAPIError], str]
    """Describe an error for agents, without the database's address, role or files."""
    close: Callable[[], None]
    """Wait for the functions under way, then close all connections."""
    integrity: Integrity | None = None
    """None on PostgreSQL, which verifies its pages itself (data checksums)."""
