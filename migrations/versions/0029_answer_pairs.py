"""Pairs of answers, a candidate's and the serving version's, and when a candidate began to answer prompts unseen."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0029"
down_revision = "0024"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("policy_versions", sa.Column("shadow_at", sa.Float(), nullable=True))
    op.create_table(
        "answer_pairs",
        sa.Column("id", sa.String(40), nullable=False),
        sa.Column("run_id", sa.String(40), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("against", sa.Integer(), nullable=False),
        sa.Column("session_id", sa.String(40), nullable=False),
        sa.Column("turn_id", sa.String(40), nullable=False),
        sa.Column("state", sa.String(12), nullable=False),
        sa.Column("finish_reason", sa.String(16), nullable=False),
        sa.Column("output_tokens", sa.Integer(), nullable=False),
        sa.Column("seconds", sa.Float(), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("judge", sa.String(64), nullable=True),
        sa.Column("preference", sa.Float(), nullable=True),
        sa.Column("is_consistent", sa.Boolean(), nullable=True),
        sa.Column("judged_at", sa.Float(), nullable=True),
        sa.Column("prompt_tokens", sa.Integer(), server_default="0", nullable=False),
        sa.Column("completion_tokens", sa.Integer(), server_default="0", nullable=False),
        sa.Column("cost", sa.Float(), nullable=True),
        sa.Column("response", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_answer_pairs")),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_answer_pairs_run_id_runs")),
        sa.ForeignKeyConstraint(["session_id"], ["sessions.id"], name=op.f("fk_answer_pairs_session_id_sessions")),
        sa.ForeignKeyConstraint(["turn_id"], ["turns.id"], name=op.f("fk_answer_pairs_turn_id_turns")),
    )
    op.create_index(op.f("ix_answer_pairs_run_id_version"), "answer_pairs", ["run_id", "version"])
    op.create_index(op.f("ix_answer_pairs_session_id"), "answer_pairs", ["session_id"])


def downgrade() -> None:
    op.drop_table("answer_pairs")
    op.drop_column("policy_versions", "shadow_at")
