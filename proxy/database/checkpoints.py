"""SQLite's log, written back into the file beside those who write."""

from __future__ import annotations

import sqlite3
import threading
from contextlib import closing, suppress

from sqlalchemy import Connection

_CHANGES = 256
"""Rows changed between two checkpoints: some hundred pages of the log."""


class Checkpoints:
    """Checkpoints on a thread of their own, which starts when the first is due. A commit that makes one waits for
    the disk, twice; beside a checkpoint, others read and write on."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._changes = 0
        self._due = threading.Event()
        self._closed = False
        self._thread: threading.Thread | None = None

    def committed(self, connection: Connection) -> None:
        """To be told of every commit, on one connection at a time."""
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
        """Waits for a last one, where there were any."""
        if self._thread is not None:
            self._closed = True
            self._due.set()
            self._thread.join()

    def _serve(self) -> None:
        with closing(sqlite3.connect(self._path, isolation_level=None)) as connection:
            last = False
            while not last:
                self._due.wait()
                self._due.clear()
                last = self._closed
                with suppress(sqlite3.Error):  # then a commit makes one, once the log is long
                    connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
