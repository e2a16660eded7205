"""Brings a database to the tables of this version of base-rl. Synchronous: call it in a thread.

The scripts are the `migrations` package; nothing needs an alembic.ini. All steps of one call are one transaction.
"""

from __future__ import annotations

import fcntl
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.util import CommandError
from sqlalchemy import URL, Connection, create_engine, event, make_url
from sqlalchemy.exc import DatabaseError
from sqlalchemy.pool import NullPool

import migrations
from proxy.settings import ConfigurationError

HEAD = "head"
_SYNC_DRIVERS = {"sqlite+aiosqlite": "sqlite", "postgresql+asyncpg": "postgresql+psycopg"}


def upgrade(url: str, revision: str = HEAD) -> None:
    """Raises ConfigurationError for a database that a newer base-rl has migrated further, and for a damaged file."""
    try:
        _run(url, lambda config: command.upgrade(config, revision))
    except CommandError as error:
        raise ConfigurationError(
            f"the database {make_url(url).render_as_string()} does not fit this version of base-rl ({error}); "
            "it was probably used by a newer one: use that, or another database"
        ) from error
    except DatabaseError as error:
        if type(error.orig) is not sqlite3.DatabaseError:  # its subclasses are other things than a damaged file
            raise
        raise ConfigurationError(
            f"{make_url(url).database} is damaged or no database ({error.orig}): restore it from a backup, or move "
            "it away to start with an empty store"
        ) from error


def downgrade(url: str, revision: str) -> None:
    """`base` removes every table."""
    _run(url, lambda config: command.downgrade(config, revision))


def current(url: str) -> str | None:
    """The revision that the database is at; None for one that was never migrated."""
    with _connection(url) as connection:
        return MigrationContext.configure(connection).get_current_revision()


def _run(url: str, action: Callable[[Config], None]) -> None:
    with _connection(url) as connection:
        action(_config(connection))


def _config(connection: Connection) -> Config:
    config = Config()
    config.set_main_option("script_location", str(Path(migrations.__file__).parent).replace("%", "%%"))
    config.attributes["connection"] = connection
    return config


@contextmanager
def _connection(url: str) -> Iterator[Connection]:
    """One transaction on a synchronous connection, which no other process migrates beside."""
    target = make_url(url)
    target = target.set(drivername=_SYNC_DRIVERS.get(target.drivername, target.drivername))
    engine = create_engine(target, poolclass=NullPool)
    is_sqlite = target.get_backend_name() == "sqlite"
    if is_sqlite:
        event.listen(engine, "connect", _on_sqlite_connect)
        event.listen(engine, "begin", _on_sqlite_begin)
    try:
        with _sole_process(target) if is_sqlite else _alone(), engine.begin() as connection:
            yield connection
    finally:
        engine.dispose()


def _on_sqlite_connect(connection: sqlite3.Connection, _record: object) -> None:
    """Tables are made and dropped inside the transaction, and the file is in WAL mode before anybody reads it."""
    connection.isolation_level = None
    connection.execute("PRAGMA journal_mode = WAL").close()


def _on_sqlite_begin(connection: Connection) -> None:
    connection.exec_driver_sql("BEGIN IMMEDIATE")


@contextmanager
def _alone() -> Iterator[None]:
    yield


@contextmanager
def _sole_process(url: URL) -> Iterator[None]:
    """Holds a lock file beside the database; the kernel frees it with the process, however that ends."""
    path = Path(f"{url.database}.lock")
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
