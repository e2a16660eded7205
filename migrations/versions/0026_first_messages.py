"""The first message of a session's user, as a hash."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0026"
down_revision = "0021"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("sessions", sa.Column("first_message", sa.LargeBinary(16), nullable=True))


def downgrade() -> None:
    op.drop_column("sessions", "first_message")
