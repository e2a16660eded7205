"""Checkpoints: write SQLite's write-ahead log back into the database file in the background, and bound its length."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress

from sqlalchemy import Connection

# Rows changed between two checkpoints; they fill some hundred pages of the log.
_CHANGES = 256

# Pages (64 MiB) beyond which the log is emptied even if others must wait. The log restarts only while nobody reads
# from it, so readers that overlap without a gap would let it grow without bound.
LONG_LOG = 4000

# How long emptying the log may wait for readers. Nothing is written meanwhile.
_EMPTYING_WAITS_SECONDS = 0.2

# The least time between two attempts. While a reader stays for minutes, writers lose at most 4 % of their time.
_EMPTYING_PAUSE_SECONDS = 5.0


class Checkpoints:
    """Makes checkpoints on its own thread, which starts when the first is due."""

    # Without it, a commit makes the checkpoint itself and waits for the disk twice. On another thread, reads and
    # writes continue during the checkpoint.

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
        """Count a commit's changes. Call it after every commit, on one connection at a time."""
        changes = connection.connection.driver_connection.total_changes  # type: ignore[union-attr]
        if changes < self._changes:  # a new connection counts from 0
            self._changes = 0
        if changes - self._changes < _CHANGES:
            return
        self._changes = changes
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="store-checkpoints", daemon=True)
            self._thread.start()
        self._due.set()

    def close(self) -> None:
        """Make a last checkpoint if any was made before, and wait for it."""
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
                with suppress(sqlite3.Error):  # without one, a commit makes it once the log is long
                    _busy, pages, _written = connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
                    if pages > self._long_log and self._now() - self._emptied_at >= _EMPTYING_PAUSE_SECONDS:
                        self._emptied_at = self._now()
                        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
