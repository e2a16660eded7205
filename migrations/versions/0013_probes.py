"""Probes of versions: log-probabilities by which an engine proves that it has loaded them."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0011"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("policy_versions", sa.Column("probe", sa.JSON(), nullable=True))


def downgrade() -> None:
    op.drop_column("policy_versions", "probe")
