"""Runs may be pinned to a version that engines serve in place of the head."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0018"
down_revision = "0017"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("runs", sa.Column("pinned_version", sa.Integer(), nullable=True))


def downgrade() -> None:
    op.drop_column("runs", "pinned_version")
