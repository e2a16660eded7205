"""Versions that trainers send to engines before they are on the disk."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0034"
down_revision = "0033"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("policy_versions", sa.Column("offer", sa.JSON(), nullable=True))


def downgrade() -> None:
    op.drop_column("policy_versions", "offer")
