"""SQLite's write-ahead log, written back into the database file beside those who write, and kept short."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress

from sqlalchemy import Connection

_CHANGES = 256
"""Rows changed between two checkpoints: some hundred pages of the log."""

LONG_LOG = 4000
"""Pages (64 MiB) beyond which the log is emptied even if that makes others wait: readers that overlap without a gap
would otherwise let it grow for ever, as it starts again only in a moment in which nobody reads from it."""

_EMPTYING_WAITS_SECONDS = 0.2
"""How long emptying the log may wait for readers. Nothing is written meanwhile."""

_EMPTYING_PAUSE_SECONDS = 5.0
"""The least time between two attempts: behind a reader that stays for minutes, writers lose at most 4 % to them."""


class Checkpoints:
    """Checkpoints on a thread of their own, which starts when the first is due. A commit that makes one waits for
    the disk, twice; beside a checkpoint, others read and write on."""

    def __init__(self, path: str, *, long_log: int = LONG_LOG, now: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._long_log = long_log
        self._now = now
        self._emptied_at = -_EMPTYING_PAUSE_SECONDS
        self._changes = 0
        self._due = threading.Event()
        self._closed = False
        self._thread: threading.Thread | None = None

    def committed(self, connection: Connection) -> None:
        """Hear of a commit; to be called after every one, on one connection at a time."""
        changes = connection.connection.driver_connection.total_changes  # type: ignore[union-attr]
        if changes < self._changes:  # another connection
            self._changes = 0
        if changes - self._changes < _CHANGES:
            return
        self._changes = changes
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="store-checkpoints", daemon=True)
            self._thread.start()
        self._due.set()

    def close(self) -> None:
        """Make a last checkpoint if there were any, and wait for it."""
        if self._thread is not None:
            self._closed = True
            self._due.set()
            self._thread.join()

    def _serve(self) -> None:
        patience = _EMPTYING_WAITS_SECONDS
        with closing(sqlite3.connect(self._path, isolation_level=None, timeout=patience)) as connection:
            last = False
            while not last:
                self._due.wait()
                self._due.clear()
                last = self._closed
                with suppress(sqlite3.Error):  # then a commit makes one, once the log is long
                    _busy, pages, _written = connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
                    if pages > self._long_log and self._now() - self._emptied_at >= _EMPTYING_PAUSE_SECONDS:
                        self._emptied_at = self._now()
                        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
