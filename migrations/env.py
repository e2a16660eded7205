"""Alembic's environment, on the connection of `proxy.database.migrate` or, for developers, the URL in alembic.ini."""

from __future__ import annotations

from alembic import context
from sqlalchemy import Connection, create_engine

from proxy.database.tables import Base


def migrate(connection: Connection) -> None:
    context.configure(
        connection=connection, target_metadata=Base.metadata, render_as_batch=True, compare_server_default=True
    )
    with context.begin_transaction():
        context.run_migrations()


given = context.config.attributes.get("connection")
if given is not None:
    migrate(given)
else:
    with create_engine(context.config.get_main_option("sqlalchemy.url") or "sqlite://").connect() as opened:
        migrate(opened)
