"""Checksums of all files of a version, and the reason why a version was rejected."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None

_COLUMNS = ("weights_files", "rejected_because", "rejected_at", "engine_deaths")


def upgrade() -> None:
    op.add_column("policy_versions", sa.Column("weights_files", sa.JSON(), nullable=True))
    op.add_column("policy_versions", sa.Column("rejected_because", sa.Text(), nullable=True))
    op.add_column("policy_versions", sa.Column("rejected_at", sa.Float(), nullable=True))
    op.add_column("policy_versions", sa.Column("engine_deaths", sa.Integer(), nullable=False, server_default="0"))


def downgrade() -> None:
    for column in reversed(_COLUMNS):
        op.drop_column("policy_versions", column)
