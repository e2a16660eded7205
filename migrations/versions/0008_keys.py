"""The time of a key's last use, and sign-ins to the admin page that have ended."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("api_keys", sa.Column("last_used_at", sa.Float(), nullable=True))
    op.create_table(
        "sign_outs",
        sa.Column("sign_in", sa.String(length=40), nullable=False),
        sa.Column("until", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("sign_in", name=op.f("pk_sign_outs")),
    )


def downgrade() -> None:
    op.drop_table("sign_outs")
    op.drop_column("api_keys", "last_used_at")
