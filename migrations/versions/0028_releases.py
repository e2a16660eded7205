"""Versions that wait for gates: the promoted version of a run, findings, results of evaluations, held sessions."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0028"
down_revision = "0022"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("runs", sa.Column("promoted_version", sa.Integer(), nullable=True))
    op.add_column("policy_versions", sa.Column("canary_at", sa.Float(), nullable=True))
    op.create_table(
        "version_findings",
        sa.Column("run_id", sa.String(40), nullable=False),
        sa.Column("version", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("gate", sa.String(32), nullable=False),
        sa.Column("state", sa.String(8), nullable=False),
        sa.Column("text", sa.Text(), nullable=False),
        sa.Column("evidence", sa.JSON(), nullable=False),
        sa.Column("updated_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("run_id", "version", "gate", name=op.f("pk_version_findings")),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_version_findings_run_id_runs")),
    )
    op.create_table(
        "evaluation_results",
        sa.Column("run_id", sa.String(40), nullable=False),
        sa.Column("version", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("suite", sa.String(64), nullable=False),
        sa.Column("task", sa.String(200), nullable=False),
        sa.Column("attempt", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("reward", sa.Float(), nullable=False),
        sa.Column("session_id", sa.String(40), nullable=True),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("run_id", "version", "suite", "task", "attempt", name=op.f("pk_evaluation_results")),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_evaluation_results_run_id_runs")),
    )
    op.create_table(
        "version_holds",
        sa.Column("id", sa.String(40), nullable=False),
        sa.Column("run_id", sa.String(40), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("key_id", sa.String(40), nullable=True),
        sa.Column("share", sa.Float(), nullable=True),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_version_holds")),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_version_holds_run_id_runs")),
    )
    op.create_index(op.f("ix_version_holds_run_id"), "version_holds", ["run_id"])


def downgrade() -> None:
    op.drop_table("version_holds")
    op.drop_table("evaluation_results")
    op.drop_table("version_findings")
    op.drop_column("policy_versions", "canary_at")
    op.drop_column("runs", "promoted_version")
