"""Runs that begin from another run's version, and the last call that named an older version."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("runs", sa.Column("begun_from_run_id", sa.String(length=40), nullable=True))
    op.add_column("runs", sa.Column("begun_from_version", sa.Integer(), nullable=True))
    op.add_column("policy_versions", sa.Column("asked_at", sa.Float(), nullable=True))


def downgrade() -> None:
    op.drop_column("policy_versions", "asked_at")
    op.drop_column("runs", "begun_from_version")
    op.drop_column("runs", "begun_from_run_id")
