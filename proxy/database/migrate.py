"""Migrations: bring a database to the tables of this version of base-rl. Synchronous; call it in a thread.

The scripts are the `migrations` package, and no alembic.ini is needed. All steps of one call run in one transaction.
"""

from __future__ import annotations

import fcntl
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from alembic.util import CommandError
from sqlalchemy import URL, Connection, Engine, create_engine, event, inspect, make_url
from sqlalchemy.exc import DatabaseError, OperationalError, ProgrammingError
from sqlalchemy.pool import NullPool

import migrations
from proxy.database.integrity import is_damage
from proxy.database.postgresql import connect_arguments, is_full, sqlstate
from proxy.database.tables import Base
from proxy.errors import StoreUnavailable
from proxy.private_files import make_directory, make_file, open_file
from proxy.settings import ConfigurationError

HEAD = "head"
_DRIVERS = {"sqlite": "sqlite", "postgresql": "postgresql+psycopg"}
_ADVISORY_LOCK = 0x6261_7365_2D72_6C  # "base-rl" in ASCII: locked while a PostgreSQL database is migrated
_CONNECT_SECONDS = 10.0
# No prepared statements: behind a pooler in transaction mode, the next transaction runs in another session.
_UNPREPARED = {**connect_arguments(_CONNECT_SECONDS), "prepare_threshold": None}
# How long to wait for a server without a free connection: twice the time after which proxies close idle ones.
_FULL_SECONDS = 20.0
_FULL_PAUSE_SECONDS = 0.5

# Errors of a file or directory without write permission, or of a file system that is mounted read-only.
_NOT_OURS = frozenset({sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM})

_REFUSED = {
    "28P01": "the password is wrong",
    "28000": "the server refuses this user (pg_hba.conf)",
    "3D000": "there is no such database: make it with `createdb`",
    "42501": "the user may not make tables there: make it the owner of the database or its schema",
    "3F000": "there is no schema to make tables in",
}


def upgrade(url: str, revision: str = HEAD) -> None:
    """Migrate the database to `revision`.

    Raise ConfigurationError if a newer base-rl has migrated it further, if it is damaged, or if it refuses access.
    Raise StoreUnavailable if it cannot be reached.
    """
    with _clear_errors(url), _connection(url) as connection:
        command.upgrade(_config(connection), revision)
        if revision == HEAD:
            missing = missing_columns(connection)
            if missing:
                raise ConfigurationError(
                    f"the database {_shown(url)} lacks {', '.join(missing[:5])}, which its revision has: somebody "
                    "changed its tables; restore it from a backup, or name another database"
                )


def downgrade(url: str, revision: str) -> None:
    """Migrate the database back to `revision`; `base` removes every table."""
    with _connection(url) as connection:
        command.downgrade(_config(connection), revision)


def current(url: str) -> str | None:
    """Return the database's revision; None if it was never migrated. Raise like `upgrade`."""
    with _clear_errors(url), _connection(url) as connection:
        return MigrationContext.configure(connection).get_current_revision()


def newest() -> str:
    """Return the revision that this version of base-rl works with."""
    return str(ScriptDirectory(str(_scripts())).get_current_head())


def is_known(revision: str) -> bool:
    """Return whether this version of base-rl has the migration, so that it can upgrade a database from there."""
    # Not by comparison: the numbers of migrations are not in their order.
    return any(script.revision == revision for script in ScriptDirectory(str(_scripts())).walk_revisions())


def missing_columns(connection: Connection) -> list[str]:
    """Return the declared tables and columns that the database lacks."""
    found = {
        table: {column["name"] for column in columns}
        for (_schema, table), columns in inspect(connection).get_multi_columns().items()
    }
    missing = [name for name in Base.metadata.tables if name not in found]
    for name, table in Base.metadata.tables.items():
        missing += [
            f"{name}.{column.name}" for column in table.columns if column.name not in found.get(name, table.columns)
        ]
    return missing


@contextmanager
def opened(url: str) -> Iterator[Connection]:
    """Open a read transaction, which sees a single committed state and blocks no writer. Raise like `upgrade`."""
    target = make_url(url)
    target = target.set(drivername=_DRIVERS[target.get_backend_name()])
    if target.get_backend_name() == "sqlite":
        engine = create_engine(target, poolclass=NullPool)
        event.listen(engine, "connect", _on_sqlite_connect)
        event.listen(engine, "begin", _on_sqlite_read)
    else:
        level = "REPEATABLE READ"
        engine = create_engine(target, poolclass=NullPool, connect_args=_UNPREPARED, isolation_level=level)
    with _clear_errors(url), _connected(engine) as connection:
        yield connection


def _scripts() -> Path:
    return Path(migrations.__file__).parent


def _config(connection: Connection) -> Config:
    config = Config()
    config.set_main_option("script_location", str(_scripts()).replace("%", "%%"))
    config.attributes["connection"] = connection
    return config


@contextmanager
def _clear_errors(url: str) -> Iterator[None]:
    """Turn errors of the driver and of alembic into errors that say what to do."""
    shown = _shown(url)
    try:
        yield
    except CommandError as error:
        raise ConfigurationError(
            f"the database {shown} does not fit this version of base-rl ({error}); "
            "it was probably used by a newer one: use that, or another database"
        ) from error
    except OSError as error:
        raise ConfigurationError(
            f"the store {make_url(url).database} cannot be written ({error.strerror or error}): give base-rl the "
            "right to write there, or name another data directory"
        ) from error
    except DatabaseError as error:
        reason = " ".join(str(error.orig).split())
        if is_damage(error.orig):
            raise ConfigurationError(
                f"{make_url(url).database} is damaged or no database ({error.orig}): restore it from a backup, or "
                "move it away to start with an empty store"
            ) from error
        if getattr(error.orig, "sqlite_errorcode", 0) & 0xFF in _NOT_OURS:
            raise ConfigurationError(
                f"the store {make_url(url).database} cannot be written ({error.orig}): give base-rl the right to "
                "write the file and its directory, or name another data directory"
            ) from error
        known = _refusal(error)
        if known is not None:
            raise ConfigurationError(f"the database {shown} cannot be used: {known} ({reason})") from error
        if isinstance(error, ProgrammingError) or "already exists" in reason:
            raise ConfigurationError(
                f"the database {shown} has other tables than base-rl made ({reason}): name an empty database, or "
                "restore this one from a backup"
            ) from error
        if isinstance(error, OperationalError):
            raise StoreUnavailable(f"the database {shown} cannot be reached or written: {reason}") from error
        raise


def _refusal(error: DatabaseError) -> str | None:
    """Return why the server refused us, if it did."""
    state = sqlstate(error)
    if state in _REFUSED:
        return _REFUSED[state]
    message = str(error.orig)
    # A refused connection has no error code in psycopg, only the server's message.
    for state, telling in (("28P01", "password authentication failed"), ("28000", "pg_hba.conf")):
        if telling in message:
            return _REFUSED[state]
    if "FATAL:" in message and "does not exist" in message:
        return "there is no such database or user" if "role" in message else _REFUSED["3D000"]
    return None


def _shown(url: str) -> str:
    """Return the address as people write it: without its password and without our driver."""
    address = make_url(url)
    return address.set(drivername=address.get_backend_name()).render_as_string()


@contextmanager
def _connection(url: str) -> Iterator[Connection]:
    """Open a write transaction while no other process migrates the database."""
    target = make_url(url)
    target = target.set(drivername=_DRIVERS[target.get_backend_name()])
    if target.get_backend_name() == "sqlite":
        engine = create_engine(target, poolclass=NullPool)
        event.listen(engine, "connect", _on_sqlite_connect)
        event.listen(engine, "begin", _on_sqlite_begin)
        alone = _sole_process(target)
    else:
        engine = create_engine(target, poolclass=NullPool, connect_args=_UNPREPARED)
        event.listen(engine, "begin", _on_postgresql_begin)
        alone = _nothing()
    try:
        with alone, _connected(engine) as connection, connection.begin():
            yield connection
    finally:
        engine.dispose()


def _connected(engine: Engine) -> Connection:
    """Return a connection; wait for one while other programs use all that the server has."""
    deadline = time.monotonic() + _FULL_SECONDS
    while True:
        try:
            return engine.connect()
        except DatabaseError as error:
            if not is_full(error) or time.monotonic() > deadline:
                raise
            time.sleep(_FULL_PAUSE_SECONDS)


def _on_sqlite_connect(connection: sqlite3.Connection, _record: object) -> None:
    connection.isolation_level = None  # so that the driver does not commit before it changes tables
    connection.execute("PRAGMA page_size = 16384").close()  # for a new file: a page then has room for seven turns
    connection.execute("PRAGMA journal_mode = WAL").close()  # before anybody reads the file


def _on_sqlite_begin(connection: Connection) -> None:
    connection.exec_driver_sql("BEGIN IMMEDIATE")


def _on_sqlite_read(connection: Connection) -> None:
    connection.exec_driver_sql("BEGIN")


def _on_postgresql_begin(connection: Connection) -> None:
    connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({_ADVISORY_LOCK})")


@contextmanager
def _nothing() -> Iterator[None]:
    yield


@contextmanager
def _sole_process(url: URL) -> Iterator[None]:
    """Lock a file beside the database."""
    # A lock of the kernel's: it is released when the process ends, however that happens.
    path = Path(f"{url.database}.lock")
    make_directory(path.parent)
    make_file(Path(str(url.database)))
    with open_file(path, "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
