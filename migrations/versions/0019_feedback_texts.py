"""Texts about sessions and turns."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0019"
down_revision = "0018"
branch_labels = None
depends_on = None


def upgrade() -> None:
    identifier = sa.String(40)
    byte_ordered = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")
    op.create_table(
        "feedback_texts",
        sa.Column(
            "sequence", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False
        ),
        sa.Column("id", identifier, nullable=False),
        sa.Column("run_id", identifier, nullable=False),
        sa.Column("session_id", identifier, nullable=False),
        sa.Column("turn_id", identifier, nullable=True),
        sa.Column("text", sa.Text(), nullable=False),
        sa.Column("source", sa.String(128), nullable=False),
        sa.Column("idempotency_key", byte_ordered, nullable=True),
        sa.Column("after_training", sa.Boolean(), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("sequence", name=op.f("pk_feedback_texts")),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_feedback_texts_run_id_runs")),
        sa.ForeignKeyConstraint(["session_id"], ["sessions.id"], name=op.f("fk_feedback_texts_session_id_sessions")),
        sa.ForeignKeyConstraint(["turn_id"], ["turns.id"], name=op.f("fk_feedback_texts_turn_id_turns")),
        sa.UniqueConstraint("id", name=op.f("uq_feedback_texts_id")),
        sa.UniqueConstraint("run_id", "idempotency_key", name=op.f("uq_feedback_texts_run_id_idempotency_key")),
    )
    op.create_index(op.f("ix_feedback_texts_session_id"), "feedback_texts", ["session_id"])
    op.create_index(op.f("ix_feedback_texts_run_id_created_at"), "feedback_texts", ["run_id", "created_at"])


def downgrade() -> None:
    op.drop_table("feedback_texts")
