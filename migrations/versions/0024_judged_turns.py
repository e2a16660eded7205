"""The turn that a judgement is about."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0024"
down_revision = "0028"
branch_labels = None
depends_on = None


def upgrade() -> None:
    with op.batch_alter_table("judgements") as table:
        table.add_column(sa.Column("turn_id", sa.String(40), nullable=True))


def downgrade() -> None:
    with op.batch_alter_table("judgements") as table:
        table.drop_column("turn_id")
