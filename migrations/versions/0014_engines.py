"""Engines as rows, and what each proxy reports about them."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "engines",
        sa.Column("id", sa.String(40), nullable=False),
        sa.Column("name", sa.String(160), nullable=False),
        sa.Column("url", sa.Text(), nullable=False),
        sa.Column("machine", sa.String(64), nullable=False),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("base_model", sa.Text(), nullable=False),
        sa.Column("run", sa.String(64), nullable=True),
        sa.Column("origin", sa.String(16), nullable=False),
        sa.Column("desired", sa.String(16), nullable=False),
        sa.Column("lease_owner", sa.String(160), nullable=True),
        sa.Column("lease_until", sa.Float(), nullable=True),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_engines")),
        sa.UniqueConstraint("name", name=op.f("uq_engines_name")),
    )
    op.create_table(
        "engine_reports",
        sa.Column("engine_id", sa.String(40), nullable=False),
        sa.Column("proxy", sa.String(160), nullable=False),
        sa.Column("declares", sa.Boolean(), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("problem", sa.Text(), nullable=True),
        sa.Column("runs", sa.JSON(), nullable=False),
        sa.Column("adapters", sa.JSON(), nullable=False),
        sa.Column("calls", sa.Integer(), nullable=False),
        sa.Column("outstanding_tokens", sa.Integer(), nullable=False),
        sa.Column("seen_at", sa.Float(), nullable=True),
        sa.Column("valid_until", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(["engine_id"], ["engines.id"], name=op.f("fk_engine_reports_engine_id_engines")),
        sa.PrimaryKeyConstraint("engine_id", "proxy", name=op.f("pk_engine_reports")),
    )


def downgrade() -> None:
    op.drop_table("engine_reports")
    op.drop_table("engines")
