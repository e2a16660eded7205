"""Columns and a table for replaying and auditing training steps."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("claims", sa.Column("process", sa.String(length=64), nullable=True))
    op.add_column("claimed_sessions", sa.Column("turn_rewards", sa.JSON(), nullable=True))
    op.add_column("policy_versions", sa.Column("weights_removed_at", sa.Float(), nullable=True))
    op.add_column("policy_versions", sa.Column("inputs", sa.JSON(), nullable=True))
    op.create_table(
        "token_audits",
        sa.Column("run_id", sa.String(length=40), nullable=False),
        sa.Column("version", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("turn_id", sa.String(length=40), nullable=False),
        sa.Column("session_id", sa.String(length=40), nullable=False),
        sa.Column("logprobs", sa.LargeBinary(), nullable=False),
        sa.Column("engine_logprobs", sa.LargeBinary(), nullable=False),
        sa.Column("advantages", sa.LargeBinary(), nullable=False),
        sa.Column("staleness", sa.LargeBinary(), nullable=False),
        sa.Column("clipped", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_token_audits_run_id_runs")),
        sa.PrimaryKeyConstraint("run_id", "version", "turn_id", name=op.f("pk_token_audits")),
    )
    op.create_index(op.f("ix_token_audits_session_id"), "token_audits", ["session_id"])


def downgrade() -> None:
    op.drop_table("token_audits")
    op.drop_column("policy_versions", "inputs")
    op.drop_column("policy_versions", "weights_removed_at")
    op.drop_column("claimed_sessions", "turn_rewards")
    op.drop_column("claims", "process")
