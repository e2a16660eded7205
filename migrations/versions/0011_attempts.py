"""Attempt numbers of sessions that share a name."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("sessions", sa.Column("attempt", sa.Integer(), server_default=sa.text("1"), nullable=False))
    op.execute(
        "UPDATE sessions SET attempt = numbered.attempt FROM ("
        "SELECT id, row_number() OVER (PARTITION BY run_id, external_id ORDER BY created_at, id) AS attempt "
        "FROM sessions WHERE external_id IS NOT NULL"
        ") AS numbered WHERE numbered.id = sessions.id AND numbered.attempt > 1"
    )
    _index_names_by("attempt", instead_of="created_at")


def downgrade() -> None:
    _index_names_by("created_at", instead_of="attempt")
    op.drop_column("sessions", "attempt")


def _index_names_by(column: str, *, instead_of: str) -> None:
    """Recreate the index that finds the newest session of a name, for calls, rewards and pages."""
    named = sa.text("external_id IS NOT NULL")
    op.drop_index(op.f(f"ix_sessions_run_id_external_id_{instead_of}"), "sessions")
    op.create_index(
        op.f(f"ix_sessions_run_id_external_id_{column}"),
        "sessions",
        ["run_id", "external_id", column],
        sqlite_where=named,
        postgresql_where=named,
    )
