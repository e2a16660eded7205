"""Background jobs and their schedules."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None


def upgrade() -> None:
    byte_ordered = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")
    op.create_table(
        "jobs",
        sa.Column("id", sa.String(40), nullable=False),
        sa.Column("kind", sa.String(64), nullable=False),
        sa.Column("key", byte_ordered, nullable=False),
        sa.Column("run_id", sa.String(40), server_default=sa.text("''"), nullable=False),
        sa.Column("state", sa.String(12), nullable=False),
        sa.Column("payload", sa.JSON(), nullable=False),
        sa.Column("result", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("error", sa.Text(), nullable=True),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("due_at", sa.Float(), nullable=False),
        sa.Column("dispatched_at", sa.Float(), nullable=True),
        sa.Column("owner", sa.String(128), nullable=True),
        sa.Column("lease_until", sa.Float(), nullable=True),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("started_at", sa.Float(), nullable=True),
        sa.Column("finished_at", sa.Float(), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_jobs")),
        sa.UniqueConstraint("kind", "key", name=op.f("uq_jobs_kind_key")),
        sa.CheckConstraint(
            "state IN ('waiting', 'running', 'failed', 'done', 'dead', 'cancelled')", name=op.f("ck_jobs_state")
        ),
    )
    for name, columns, condition in (
        ("ix_jobs_pending", ["kind", "run_id", "due_at"], "state IN ('waiting', 'failed')"),
        ("ix_jobs_running", ["kind"], "state = 'running'"),
        ("ix_jobs_dead", ["id"], "state = 'dead'"),
        ("ix_jobs_finished", ["finished_at"], "finished_at IS NOT NULL"),
    ):
        where = sa.text(condition)
        op.create_index(name, "jobs", columns, sqlite_where=where, postgresql_where=where)
    op.create_table(
        "job_schedules",
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("ticked_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_job_schedules")),
    )


def downgrade() -> None:
    op.drop_table("job_schedules")
    op.drop_table("jobs")
