"""No foreign keys in `claimed_sessions`: PostgreSQL would look up each session and the claim for every row."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

_REFERENCES = (
    ("fk_claimed_sessions_claim_id_claims", "claims", "claim_id"),
    ("fk_claimed_sessions_session_id_sessions", "sessions", "session_id"),
)
_COLUMNS = "claim_id, session_id, position, reward, reward_ids, turn_count, turn_rewards"


def upgrade() -> None:
    if op.get_bind().dialect.name == "sqlite":
        _rebuild(references=False)
        return
    for name, _referred, _column in _REFERENCES:
        op.drop_constraint(op.f(name), "claimed_sessions", type_="foreignkey")


def downgrade() -> None:
    if op.get_bind().dialect.name == "sqlite":
        _rebuild(references=True)
        return
    for name, referred, column in _REFERENCES:
        op.create_foreign_key(op.f(name), "claimed_sessions", referred, [column], ["id"])


def _rebuild(*, references: bool) -> None:
    """Create a new table in SQLite, as the present code would."""
    op.drop_index(op.f("ix_claimed_sessions_session_id"), "claimed_sessions")
    op.rename_table("claimed_sessions", "claimed_sessions_before")
    op.create_table(
        "claimed_sessions",
        sa.Column("claim_id", sa.String(length=40), nullable=False),
        sa.Column("session_id", sa.String(length=40), nullable=False),
        sa.Column("position", sa.Integer(), nullable=False),
        sa.Column("reward", sa.Float(), nullable=True),
        sa.Column("reward_ids", sa.JSON(), nullable=False),
        sa.Column("turn_count", sa.Integer(), nullable=False),
        sa.Column("turn_rewards", sa.JSON(), nullable=True),
        *(
            sa.ForeignKeyConstraint([column], [f"{referred}.id"], name=op.f(name))
            for name, referred, column in (_REFERENCES if references else ())
        ),
        sa.PrimaryKeyConstraint("claim_id", "session_id", name=op.f("pk_claimed_sessions")),
    )
    op.execute(
        f"INSERT INTO claimed_sessions ({_COLUMNS}) SELECT {_COLUMNS} FROM claimed_sessions_before ORDER BY rowid"  # noqa: S608
    )
    op.drop_table("claimed_sessions_before")
    op.create_index(op.f("ix_claimed_sessions_session_id"), "claimed_sessions", ["session_id"])
