"""The one clock that all proxies on a store agree on."""

from __future__ import annotations

from sqlalchemy import Connection, text

from proxy.clock import Clock


def database_now(connection: Connection, clock: Clock) -> float:
    """Return the time in seconds since the epoch: the server's on PostgreSQL, `clock` on SQLite.

    Leases between proxies use it, because the clocks of two machines may differ by more than a lease lasts. All
    proxies on a SQLite file run on one machine.
    """
    if connection.dialect.name != "postgresql":
        return clock()
    # Not now(), which is the time at which the transaction began: it may have waited for locks since.
    return float(connection.execute(_POSTGRESQL_NOW).scalar_one())


_POSTGRESQL_NOW = text("SELECT extract(epoch FROM clock_timestamp())")
