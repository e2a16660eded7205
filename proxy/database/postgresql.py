"""The PostgreSQL backend, on psycopg 3. Several proxies write at the same time and lock the rows they change.

All work of a proxy shares a few connections, so that a server with a low connection limit is enough. A pooler in
transaction mode (PgBouncer) may stand in between; it is detected when a connection is made. Behind a pooler the
server's session changes with every transaction, so settings are sent with each transaction and statements are not
prepared.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import psycopg
from sqlalchemy import URL, Connection, Engine, create_engine, event
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolExhausted
from sqlalchemy.pool import ConnectionPoolEntry, NullPool

from proxy.database.backend import Backend
from proxy.database.packed_json import json_text
from proxy.database.prepared import run_script
from proxy.database.threads import Begin, ConnectionThreads

# Write transactions at the same time: while the server works on one group, the proxy prepares another. The last lane
# is for writes without an order key (`Database.commit`).
_LANES = 3

# Planner settings for writes. Each names the few rows it changes, so an index finds them; before a table is analysed
# for the first time, PostgreSQL would scan all of its rows instead.
_FEW_ROWS = {"enable_seqscan": "off", "enable_hashjoin": "off", "enable_mergejoin": "off"}

# An idle connection is closed after this time: other proxies, and `base-rl db`, may need it.
IDLE_SECONDS = 10.0

# The server ends a transaction whose proxy sent nothing for this long: a hung proxy would keep its locks.
_IDLE_IN_TRANSACTION_SECONDS = 60

# A connection whose peer acknowledged nothing for this long is given up: the server's machine or the network failed,
# and nobody closed the connection.
_SILENCE_SECONDS = 15

# Serialization failure, deadlock, and a unique value that another transaction inserted first: a second run finds that
# row and uses it.
_RETRIED = frozenset({"40001", "40P01", "23505"})

# Read-only (a standby during a failover) and ended while idle in a transaction. Both mean "unavailable", and the
# driver does not raise them as OperationalError.
_UNAVAILABLE = frozenset({"25006", "25P03"})

_FULL_STATE = "53300"
# Messages of the server and of PgBouncer: the driver has no code for a refused connection.
_FULL = re.compile(r"too many (clients|connections)|remaining connection slots|no more connections allowed")

# Errors whose message does not reveal the server, its users or its tables to an agent.
_SAFE_TO_SHOW = frozenset(
    {"25006", "25P03", "40001", "40P01", "53100", "53200", "55P03", "57014", "57P01", "57P02", "57P03"}
)

_COMMIT_WAITS = {"normal": "off", "full": "on"}

_POOLED = "base_rl_pooled"


def open_postgresql(
    url: URL,
    *,
    synchronous: str | None,
    busy_timeout_seconds: float,
    connect_timeout_seconds: float,
    statement_timeout_seconds: float,
    connections: int,
) -> Backend:
    """Return the backend. Connections are made on demand, `connections` at most."""
    settings = _settings(
        url,
        {
            "jit": "off",  # compiling takes longer than these short statements run
            "synchronous_commit": _COMMIT_WAITS[synchronous] if synchronous is not None else None,
            "lock_timeout": f"{_milliseconds(busy_timeout_seconds)}",
            "statement_timeout": f"{_milliseconds(statement_timeout_seconds)}",
            "idle_in_transaction_session_timeout": f"{_milliseconds(_IDLE_IN_TRANSACTION_SECONDS)}",
        },
    )
    engine = create_engine(
        url.set(drivername="postgresql+psycopg"),
        poolclass=NullPool,
        isolation_level="AUTOCOMMIT",  # `ConnectionThreads` starts transactions, not the driver
        connect_args=connect_arguments(connect_timeout_seconds),
        json_serializer=json_text,
    )
    _set_up_connections(engine, settings)
    threads = ConnectionThreads(
        engine,
        count=connections,
        name="store",
        is_lost=_is_lost,
        is_full=is_full,
        patience_seconds=busy_timeout_seconds,
        idle_seconds=IDLE_SECONDS,
    )
    begin_write = _begin("BEGIN", settings, _FEW_ROWS)
    begin_read = _begin("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY", settings)
    shares = _Shares(threads, connections - 1, busy_timeout_seconds)
    return Backend(
        write=partial(threads.run, begin=begin_write),
        read=partial(shares.run, begin=begin_read),
        lanes=min(_LANES, max(1, connections - 1)),
        is_unavailable=lambda error: sqlstate(error) in _UNAVAILABLE,
        may_retry=lambda error: sqlstate(error) in _RETRIED,
        reason=_reason,
        close=threads.close,
    )


class _Shares:
    """Runs reads on all connections but one."""

    # Reads may take long, and model calls wait for writes: one connection always stays free for a write.

    def __init__(self, threads: ConnectionThreads, count: int, patience_seconds: float) -> None:
        self._threads = threads
        self._free = asyncio.Semaphore(count)
        self._patience = patience_seconds

    async def run(self, work: Callable[[Connection], Any], begin: Begin) -> Any:
        """Return what `work` returned. Raise PoolExhausted if no connection was free for `patience_seconds`."""
        try:
            async with asyncio.timeout(self._patience):
                await self._free.acquire()
        except TimeoutError:
            raise PoolExhausted("every connection was in use all the time") from None
        try:
            return await self._threads.run(work, begin)
        finally:
            self._free.release()


def connect_arguments(connect_timeout_seconds: float) -> dict[str, Any]:
    """Return psycopg's arguments that bound how long a missing server goes unnoticed."""
    return {
        "connect_timeout": max(2, math.ceil(connect_timeout_seconds)),  # libpq takes whole seconds, two at least
        "application_name": "base-rl",
        "keepalives_idle": _SILENCE_SECONDS,
        "keepalives_interval": 5,
        "keepalives_count": 3,
        "tcp_user_timeout": _milliseconds(_SILENCE_SECONDS),
    }


def sqlstate(error: BaseException) -> str | None:
    """Return PostgreSQL's error code; None for an error of another origin."""
    origin = error.orig if isinstance(error, DBAPIError) else error
    state = getattr(origin, "sqlstate", None)
    return state if isinstance(state, str) else None


def is_full(error: BaseException) -> bool:
    """Return whether the server, or the role's limit, has no free connection now."""
    if not isinstance(error, DBAPIError):
        return False
    return sqlstate(error) == _FULL_STATE or (sqlstate(error) is None and _FULL.search(str(error.orig)) is not None)


def _reason(error: DBAPIError) -> str:
    state = sqlstate(error)
    if state in _SAFE_TO_SHOW and isinstance(error.orig, psycopg.Error):
        return str(error.orig.diag.message_primary)
    if state is None or state.startswith(("08", "28", "3D")):
        return "the database cannot be reached; the proxy's log says why"
    return f"the database refuses ({state}); the proxy's log says why"


def _settings(url: URL, own: Mapping[str, str | None]) -> dict[str, str]:
    """Return the settings of every transaction, without those that the URL sets itself (`options=-c …`)."""
    given = url.query.get("options", "")
    text = given if isinstance(given, str) else " ".join(given)
    named = set(re.findall(r"-c\s*([a-z_.]+)\s*=", text))
    return {name: value for name, value in own.items() if value is not None and name not in named}


def _set_up_connections(engine: Engine, settings: Mapping[str, str]) -> None:
    @event.listens_for(engine, "connect")
    def on_connect(connection: psycopg.Connection[Any], entry: ConnectionPoolEntry) -> None:
        # A pooler reports an invented process id when the connection is made, as the real one changes with every
        # transaction. The server's own answer then differs.
        connection.autocommit = True
        (pid,) = connection.execute("SELECT pg_backend_pid()", prepare=False).fetchone() or (None,)
        entry.info[_POOLED] = pid != connection.info.backend_pid
        if entry.info[_POOLED]:
            connection.prepare_threshold = None  # another session may lack the statement, or have its name in use
        else:
            connection.execute(_setting("SET", settings).encode(), prepare=False)


def _begin(statement: str, settings: Mapping[str, str], local: Mapping[str, str] | None = None) -> Begin:
    direct = f"{statement};{_setting('SET LOCAL', local or {})}"
    pooled = f"{statement};{_setting('SET LOCAL', {**settings, **(local or {})})}"

    def begin(connection: Connection) -> None:
        run_script(connection, pooled if connection.info[_POOLED] else direct)

    return begin


def _setting(how: str, settings: Mapping[str, str]) -> str:
    return ";".join(f"{how} {name} = '{value}'" for name, value in settings.items())


def _milliseconds(seconds: float) -> int:
    return max(1, round(seconds * 1000))


def _is_lost(connection: Connection) -> bool:
    if connection.closed or connection.invalidated:
        return True
    return bool(getattr(connection.connection.dbapi_connection, "closed", True))
