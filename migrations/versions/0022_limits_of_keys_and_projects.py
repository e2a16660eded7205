"""Rate limits and budgets of keys and projects: limits are counted by subject, which is a run, a project or a key."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0022"
down_revision = "0026"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "limit_levels",
        sa.Column("subject_id", sa.String(length=40), nullable=False),
        *_level(),
        sa.PrimaryKeyConstraint("subject_id", "kind", name=op.f("pk_limit_levels")),
    )
    op.execute(
        "INSERT INTO limit_levels (subject_id, kind, due_at, moved_at, per_minute)"
        " SELECT run_id, kind, due_at, moved_at, per_minute FROM rate_limits"
    )
    op.drop_table("rate_limits")
    op.create_table(
        "token_budgets",
        sa.Column("subject_id", sa.String(length=40), nullable=False),
        sa.Column("period", sa.String(length=8), nullable=False),
        sa.Column("starts_at", sa.Float(), nullable=False),
        sa.Column("tokens", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("exhausted_at", sa.Float(), nullable=True),
        sa.PrimaryKeyConstraint("subject_id", "period", name=op.f("pk_token_budgets")),
    )
    op.add_column("api_keys", sa.Column("limits", sa.JSON(), nullable=True))
    op.add_column("api_keys", sa.Column("limited_as", sa.String(length=40), nullable=True))


def downgrade() -> None:
    op.drop_column("api_keys", "limited_as")
    op.drop_column("api_keys", "limits")
    op.drop_table("token_budgets")
    op.create_table(
        "rate_limits",
        sa.Column("run_id", sa.String(length=40), nullable=False),
        *_level(),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_rate_limits_run_id_runs")),
        sa.PrimaryKeyConstraint("run_id", "kind", name=op.f("pk_rate_limits")),
    )
    op.execute(
        "INSERT INTO rate_limits (run_id, kind, due_at, moved_at, per_minute)"
        " SELECT subject_id, kind, due_at, moved_at, per_minute FROM limit_levels"
        " WHERE subject_id IN (SELECT id FROM runs)"
    )
    op.drop_table("limit_levels")


def _level() -> list[sa.Column[object]]:
    return [
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("due_at", sa.Float(), nullable=False),
        sa.Column("moved_at", sa.Float(), nullable=False),
        sa.Column("per_minute", sa.Float(), nullable=False),
    ]
