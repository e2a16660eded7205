"""Reward rules of runs and claims, sessions whose rewards were revised after training, preferences, and indexes for
the ledger's filters."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

_REVISED = sa.text("revised_at IS NOT NULL")

_RUNS = sa.table("runs", sa.column("id", sa.String), sa.column("config", sa.JSON), sa.column("reward_rules", sa.JSON))
_CLAIMS = sa.table(
    "claims",
    sa.column("id", sa.String),
    sa.column("run_id", sa.String),
    sa.column("state", sa.String),
    sa.column("reward_rules", sa.JSON),
)
_SESSIONS = sa.table(
    "sessions",
    sa.column("id", sa.String),
    sa.column("training", sa.String),
    sa.column("reward", sa.Float),
    sa.column("claim_id", sa.String),
    sa.column("revised_at", sa.Float),
)
_CLAIMED = sa.table(
    "claimed_sessions",
    sa.column("claim_id", sa.String),
    sa.column("session_id", sa.String),
    sa.column("reward", sa.Float),
)
_REWARDS = sa.table(
    "rewards",
    sa.column("session_id", sa.String),
    sa.column("turn_id", sa.String),
    sa.column("after_training", sa.Boolean),
    sa.column("created_at", sa.Float),
)


def upgrade() -> None:
    op.add_column("runs", sa.Column("reward_rules", sa.JSON(), nullable=True))
    op.add_column("claims", sa.Column("reward_rules", sa.JSON(), nullable=True))
    op.add_column("sessions", sa.Column("revised_at", sa.Float(), nullable=True))
    op.create_index(
        "ix_sessions_revised", "sessions", ["run_id", "revised_at"], sqlite_where=_REVISED, postgresql_where=_REVISED
    )
    op.create_index(op.f("ix_rewards_run_id_name_created_at"), "rewards", ["run_id", "name", "created_at"])
    op.create_index(op.f("ix_rewards_run_id_source_created_at"), "rewards", ["run_id", "source", "created_at"])
    op.create_index(
        "ix_rewards_late",
        "rewards",
        ["run_id", "created_at"],
        sqlite_where=sa.text("after_training = 1"),
        postgresql_where=sa.text("after_training"),
    )
    _create_preferences()
    _fill_in_rules()
    _mark_revisions()


def downgrade() -> None:
    op.drop_table("preferences")
    for index in ("ix_rewards_late", "ix_rewards_run_id_source_created_at", "ix_rewards_run_id_name_created_at"):
        op.drop_index(index, "rewards")
    op.drop_index("ix_sessions_revised", "sessions")
    op.drop_column("sessions", "revised_at")
    op.drop_column("claims", "reward_rules")
    op.drop_column("runs", "reward_rules")


def _create_preferences() -> None:
    op.create_table(
        "preferences",
        sa.Column(
            "sequence", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False
        ),
        sa.Column("id", sa.String(length=40), nullable=False),
        sa.Column("run_id", sa.String(length=40), nullable=False),
        sa.Column("chosen_session_id", sa.String(length=40), nullable=False),
        sa.Column("chosen_turn_id", sa.String(length=40), nullable=True),
        sa.Column("rejected_session_id", sa.String(length=40), nullable=False),
        sa.Column("rejected_turn_id", sa.String(length=40), nullable=True),
        sa.Column("source", sa.String(length=128), nullable=False),
        sa.Column("comment", sa.Text(), nullable=True),
        sa.Column("idempotency_key", sa.Text(), nullable=True),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_preferences_run_id_runs")),
        *(
            sa.ForeignKeyConstraint(
                [f"{side}_{thing}_id"], [f"{thing}s.id"], name=op.f(f"fk_preferences_{side}_{thing}_id_{thing}s")
            )
            for side in ("chosen", "rejected")
            for thing in ("session", "turn")
        ),
        sa.PrimaryKeyConstraint("sequence", name=op.f("pk_preferences")),
        sa.UniqueConstraint("id", name=op.f("uq_preferences_id")),
        sa.UniqueConstraint("run_id", "idempotency_key", name=op.f("uq_preferences_run_id_idempotency_key")),
    )
    op.create_index(op.f("ix_preferences_chosen_session_id"), "preferences", ["chosen_session_id"])
    op.create_index(op.f("ix_preferences_rejected_session_id"), "preferences", ["rejected_session_id"])
    op.create_index(op.f("ix_preferences_run_id_created_at"), "preferences", ["run_id", "created_at"])


def _fill_in_rules() -> None:
    """Fill in the only rule that there was before: the weighted sum with the run's weights."""
    connection = op.get_bind()
    for run_id, config in connection.execute(sa.select(_RUNS.c.id, _RUNS.c.config)).all():
        rules: dict[str, Any] = {"weights": config.get("reward_weights", {})}
        connection.execute(sa.update(_RUNS).where(_RUNS.c.id == run_id).values(reward_rules=rules))
        connection.execute(sa.update(_CLAIMS).where(_CLAIMS.c.run_id == run_id).values(reward_rules=rules))


def _mark_revisions() -> None:
    """Mark consumed sessions whose reward has changed since, or with a turn that was rewarded after training."""
    trained_on = sa.select(_CLAIMED.c.reward).where(
        _CLAIMED.c.claim_id == _SESSIONS.c.claim_id, _CLAIMED.c.session_id == _SESSIONS.c.id
    )
    of_session = (_REWARDS.c.session_id == _SESSIONS.c.id) & _REWARDS.c.after_training
    differs = _SESSIONS.c.reward.is_distinct_from(trained_on.scalar_subquery())
    turn_rewarded = sa.exists().where(of_session, _REWARDS.c.turn_id.is_not(None))
    newest = sa.select(sa.func.max(_REWARDS.c.created_at)).where(of_session)
    op.get_bind().execute(
        sa.update(_SESSIONS)
        .where(_SESSIONS.c.training == "consumed", sa.exists().where(of_session), differs | turn_rewarded)
        .values(revised_at=newest.scalar_subquery())
    )
