"""The integrity of the SQLite file, as far as this process knows it.

`PRAGMA quick_check` reads the whole file, which takes minutes for a store of many gigabytes. It runs on its own
thread: a small file is checked before the proxy starts serving, a large one while it serves. Damage that a call meets
meanwhile is recorded as well. A damaged store is not used any further: SQLite may read wrong data from it without an
error, and its writes may destroy more.
"""

from __future__ import annotations

import sqlite3
import threading
from contextlib import closing
from enum import StrEnum

from proxy.errors import StoreDamaged
from proxy.log import logger

# SQLite's virtual-machine steps (about ten milliseconds) between two tests of whether the check should stop.
STOP_TEST_STEPS = 100_000

_DAMAGE = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})
# SQLite's extended error codes have the primary code in their lowest byte.
_PRIMARY_CODE = 0xFF

# The first line of `quick_check`'s findings, left out as there is no other database.
_HEADING = "*** in database main ***"

_LOG = logger(__name__)


class IntegrityState(StrEnum):
    """`unchecked`: the check could not run or was stopped; the log says why."""

    CHECKING = "checking"
    OK = "ok"
    DAMAGED = "damaged"
    UNCHECKED = "unchecked"


def is_damage(error: BaseException | None) -> bool:
    """Return whether the error means that SQLite's file is damaged, or is no database at all."""
    code = getattr(error, "sqlite_errorcode", None)
    return isinstance(code, int) and code & _PRIMARY_CODE in _DAMAGE


class Integrity:
    """The integrity of one file. `begin` starts the check and `close` stops it; both are optional."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._state = IntegrityState.UNCHECKED
        self._damage: str | None = None
        self._stopping = threading.Event()
        self._finished = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def state(self) -> IntegrityState:
        return IntegrityState.DAMAGED if self._damage is not None else self._state

    def begin(self) -> None:
        self._state = IntegrityState.CHECKING
        self._thread = threading.Thread(target=self._check, name="store-integrity", daemon=True)
        self._thread.start()

    def wait(self, seconds: float) -> None:
        """Wait until the check has finished, for `seconds` at most."""
        self._finished.wait(seconds)

    def close(self) -> None:
        if self._thread is not None:
            self._stopping.set()
            self._thread.join()

    def report(self, reason: str) -> None:
        """Record damage. Only the first report is logged."""
        if self._damage is None:
            self._damage = reason
            _LOG.error("the store is damaged", file=self._path, reason=reason)

    def raise_if_damaged(self) -> None:
        """Raise StoreDamaged if damage was recorded."""
        if self._damage is not None:
            raise StoreDamaged(
                f"the trajectory store is damaged ({self._damage}): stop base-rl, see `base-rl db check`, and "
                "restore the store from a backup"
            )

    def _check(self) -> None:
        try:
            with closing(sqlite3.connect(self._path, isolation_level=None)) as connection:
                connection.set_progress_handler(self._stopping.is_set, STOP_TEST_STEPS)
                found = str(connection.execute("PRAGMA quick_check(1)").fetchone()[0])
            if found != "ok":
                self.report(" ".join(found.removeprefix(_HEADING).split()))
            self._state = IntegrityState.OK
        except sqlite3.Error as error:
            self._state = IntegrityState.UNCHECKED
            if is_damage(error):
                self.report(str(error))
            elif not self._stopping.is_set():
                _LOG.warning("the store could not be checked for damage", file=self._path, reason=str(error))
        finally:
            self._finished.set()
