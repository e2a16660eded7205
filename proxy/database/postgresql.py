"""PostgreSQL's side of the store, by psycopg 3. Several proxies write at once; rows are locked where that matters."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from sqlalchemy import URL, Connection, create_engine
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.pool import NullPool

from proxy.database.backend import READERS, Backend
from proxy.database.packed_json import json_text
from proxy.database.threads import ConnectionThreads

_WRITERS = 4
_LANES = 3
"""Connections on which functions write: while the server works on one group of them, the proxy does on another. The
last is for those about no single session."""

_FEW_ROWS = {"enable_seqscan": "off", "enable_hashjoin": "off", "enable_mergejoin": "off"}
"""For functions that write, which name the few rows that they are about: of tables that it has not analysed yet,
PostgreSQL would go through all rows to find them."""

_IDLE_IN_TRANSACTION_SECONDS = 60
"""A transaction that its proxy says nothing in for so long is ended by the server: its locks would stay."""

_SILENCE_SECONDS = 15
"""A server that acknowledges nothing for so long is gone, though no connection was closed: its machine, or the
network between."""

_AGAIN = frozenset({"40001", "40P01", "23505"})
"""Serialization failure and deadlock. And a unique value that another transaction inserted first: had this one begun
a moment later it would have found the row, so it looks again."""

_UNAVAILABLE = frozenset({"25006", "25P03"})
"""Read-only (a standby, while another takes over) and ended for its silence: no OperationalErrors to the driver."""

_COMMIT_WAITS = {"normal": "off", "full": "on"}


def open_postgresql(
    url: URL,
    *,
    synchronous: str | None,
    busy_timeout_seconds: float,
    connect_timeout_seconds: float,
    statement_timeout_seconds: float,
) -> Backend:
    arguments = connect_arguments(connect_timeout_seconds)
    options = {
        "jit": "off",  # which takes longer than what it would make faster here
        "synchronous_commit": _COMMIT_WAITS[synchronous] if synchronous is not None else None,
        "lock_timeout": f"{_milliseconds(busy_timeout_seconds)}",
        "statement_timeout": f"{_milliseconds(statement_timeout_seconds)}",
        "idle_in_transaction_session_timeout": f"{_milliseconds(_IDLE_IN_TRANSACTION_SECONDS)}",
    }
    arguments["options"] = _options(url, options)
    few_rows = {**arguments, "options": _options(url, {**options, **_FEW_ROWS})}
    url = url.set(drivername="postgresql+psycopg").difference_update_query(["options"])
    pool: dict[str, Any] = {
        "max_overflow": 0,
        "pool_timeout": busy_timeout_seconds,
        "pool_pre_ping": True,
        "connect_args": arguments,
        "json_serializer": json_text,
    }
    writer = create_async_engine(url, pool_size=_WRITERS, **pool)
    reader = create_async_engine(
        url,
        pool_size=READERS,
        isolation_level="REPEATABLE READ",
        execution_options={"postgresql_readonly": True},
        **pool,
    )
    writing, reading = (
        create_engine(
            url,
            poolclass=NullPool,
            isolation_level="AUTOCOMMIT",  # transactions begin when we say so
            connect_args=given,
            json_serializer=json_text,
        )
        for given in (few_rows, arguments)
    )
    return Backend(
        writer=writer,
        reader=reader,
        write_threads=ConnectionThreads(writing, begin="BEGIN", count=_LANES, name="store-writer", is_lost=_is_lost),
        read_threads=ConnectionThreads(
            reading,
            begin="BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY",
            count=READERS,
            name="store-reader",
            is_lost=_is_lost,
        ),
        one_writer=False,
        is_unavailable=lambda error: sqlstate(error) in _UNAVAILABLE,
        may_do_again=lambda error: sqlstate(error) in _AGAIN,
    )


def connect_arguments(connect_timeout_seconds: float) -> dict[str, Any]:
    """By which a server that is away is noticed."""
    return {
        "connect_timeout": max(2, math.ceil(connect_timeout_seconds)),  # the driver takes whole seconds, two at least
        "application_name": "base-rl",
        "keepalives_idle": _SILENCE_SECONDS,
        "keepalives_interval": 5,
        "keepalives_count": 3,
        "tcp_user_timeout": _milliseconds(_SILENCE_SECONDS),
    }


def sqlstate(error: BaseException) -> str | None:
    """PostgreSQL's own code of what went wrong; None for an error of another origin."""
    origin = error.orig if isinstance(error, DBAPIError) else error
    state = getattr(origin, "sqlstate", None)
    return state if isinstance(state, str) else None


def _options(url: URL, parameters: Mapping[str, str | None]) -> str:
    """Parameters of the connection, beside those that the URL gives."""
    given = url.query.get("options", "")
    own = [f"-c {name}={value}" for name, value in parameters.items() if value is not None]
    return " ".join([*own, given if isinstance(given, str) else " ".join(given)]).strip()


def _milliseconds(seconds: float) -> int:
    return max(1, round(seconds * 1000))


def _is_lost(connection: Connection) -> bool:
    if connection.closed or connection.invalidated:
        return True
    return bool(getattr(connection.connection.dbapi_connection, "closed", True))
