"""Columns for retention, erasure and redaction."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

_ERASED = sa.text("erased_at IS NOT NULL")
_KEPT = sa.text("erased_at IS NULL")
_SESSIONS = ("erased_at", "erased_reason", "emptied_at", "origin", "held_back")
_IMPORTED = sa.text("origin IS NOT NULL")
_INDEXES = ("ix_sessions_erased", "ix_sessions_kept", "uq_sessions_origin")


def upgrade() -> None:
    op.add_column("sessions", sa.Column("erased_at", sa.Float(), nullable=True))
    op.add_column("sessions", sa.Column("erased_reason", sa.String(length=16), nullable=True))
    op.add_column("sessions", sa.Column("emptied_at", sa.Float(), nullable=True))
    op.add_column("sessions", sa.Column("origin", sa.String(length=40), nullable=True))
    op.add_column("sessions", sa.Column("held_back", sa.Boolean(), server_default=sa.text("false"), nullable=False))
    op.create_index("ix_sessions_erased", "sessions", ["erased_at"], sqlite_where=_ERASED, postgresql_where=_ERASED)
    op.create_index(
        "ix_sessions_kept", "sessions", ["run_id", "ended_at"], sqlite_where=_KEPT, postgresql_where=_KEPT
    )
    op.create_index(
        "uq_sessions_origin",
        "sessions",
        ["run_id", "origin"],
        unique=True,
        sqlite_where=_IMPORTED,
        postgresql_where=_IMPORTED,
    )
    op.create_table(
        "session_users",
        sa.Column("session_id", sa.String(length=40), nullable=False),
        sa.Column("digest", sa.LargeBinary(length=16), nullable=False),
        sa.Column("run_id", sa.String(length=40), nullable=False),
        sa.ForeignKeyConstraint(["session_id"], ["sessions.id"], name=op.f("fk_session_users_session_id_sessions")),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_session_users_run_id_runs")),
        sa.PrimaryKeyConstraint("session_id", "digest", name=op.f("pk_session_users")),
    )
    op.create_index(op.f("ix_session_users_digest_run_id"), "session_users", ["digest", "run_id"])
    op.add_column("turns", sa.Column("masked", sa.JSON(), nullable=True))


def downgrade() -> None:
    op.drop_column("turns", "masked")
    op.drop_table("session_users")
    for index in _INDEXES:
        op.drop_index(index, "sessions")
    for column in reversed(_SESSIONS):
        op.drop_column("sessions", column)
