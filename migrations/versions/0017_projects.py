"""Projects, to which runs and keys belong; expiry of keys.

Every run goes into the project `default`.
"""

from __future__ import annotations

import time

import sqlalchemy as sa
from alembic import op

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None

_DEFAULT_ID = "prj_default"


def upgrade() -> None:
    projects = op.create_table(
        "projects",
        sa.Column("id", sa.String(length=40), nullable=False),
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("archived_at", sa.Float(), nullable=True),
        sa.Column("settings", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_projects")),
        sa.UniqueConstraint("name", name=op.f("uq_projects_name")),
    )
    default = {"id": _DEFAULT_ID, "name": "default", "created_at": time.time(), "settings": {}}
    op.bulk_insert(projects, [default])
    with op.batch_alter_table("runs") as runs:
        runs.add_column(sa.Column("project_id", sa.String(length=40), nullable=False, server_default=_DEFAULT_ID))
        runs.create_foreign_key(op.f("fk_runs_project_id_projects"), "projects", ["project_id"], ["id"])
    with op.batch_alter_table("api_keys") as keys:
        keys.add_column(sa.Column("project_id", sa.String(length=40), nullable=True))
        keys.add_column(sa.Column("expires_at", sa.Float(), nullable=True))
        keys.create_foreign_key(op.f("fk_api_keys_project_id_projects"), "projects", ["project_id"], ["id"])
    op.create_index(op.f("ix_api_keys_project_id"), "api_keys", ["project_id"])


def downgrade() -> None:
    # A key of these kinds has no meaning without projects.
    op.execute("DELETE FROM api_keys WHERE project_id IS NOT NULL OR kind IN ('project', 'viewer')")
    op.drop_index(op.f("ix_api_keys_project_id"), "api_keys")
    with op.batch_alter_table("api_keys") as keys:
        keys.drop_constraint(op.f("fk_api_keys_project_id_projects"), type_="foreignkey")
        keys.drop_column("expires_at")
        keys.drop_column("project_id")
    with op.batch_alter_table("runs") as runs:
        runs.drop_constraint(op.f("fk_runs_project_id_projects"), type_="foreignkey")
        runs.drop_column("project_id")
    op.drop_table("projects")
