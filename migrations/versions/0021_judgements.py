"""Judgements: what judges answered about sessions, and what that cost."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0021"
down_revision = "0020"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "judgements",
        sa.Column("id", sa.String(40), nullable=False),
        sa.Column("run_id", sa.String(40), nullable=False),
        sa.Column("session_id", sa.String(40), nullable=False),
        sa.Column("judge", sa.String(64), nullable=False),
        sa.Column("fingerprint", sa.String(16), nullable=False),
        sa.Column("digest", sa.String(64), nullable=False),
        sa.Column("reward_id", sa.String(40), nullable=True),
        sa.Column("score", sa.Float(), nullable=True),
        sa.Column("votes", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("invalid_votes", sa.Integer(), nullable=False),
        sa.Column("spread", sa.Float(), nullable=True),
        sa.Column("is_cut", sa.Boolean(), nullable=False),
        sa.Column("prompt_tokens", sa.Integer(), nullable=False),
        sa.Column("completion_tokens", sa.Integer(), nullable=False),
        sa.Column("cost", sa.Float(), nullable=True),
        sa.Column("error", sa.Text(), nullable=True),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_judgements")),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_judgements_run_id_runs")),
        sa.ForeignKeyConstraint(["session_id"], ["sessions.id"], name=op.f("fk_judgements_session_id_sessions")),
    )
    op.create_index(op.f("ix_judgements_run_id_judge_created_at"), "judgements", ["run_id", "judge", "created_at"])
    op.create_index(op.f("ix_judgements_session_id"), "judgements", ["session_id"])
    scored = sa.text("reward_id IS NOT NULL")
    op.create_index(
        "uq_judgements_scored",
        "judgements",
        ["session_id", "judge", "fingerprint", "digest"],
        unique=True,
        sqlite_where=scored,
        postgresql_where=scored,
    )


def downgrade() -> None:
    op.drop_table("judgements")
