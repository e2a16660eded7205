"""The first tables."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

BIG = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
BYTE_ORDERED = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")


def upgrade() -> None:
    op.create_table(
        "runs",
        sa.Column("id", sa.String(length=40), nullable=False),
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("base_model", sa.Text(), nullable=False),
        sa.Column("config", sa.JSON(), nullable=False),
        sa.Column("head_version", sa.Integer(), nullable=False),
        sa.Column("serving_version", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_runs")),
        sa.UniqueConstraint("name", name=op.f("uq_runs_name")),
    )
    op.create_table(
        "claims",
        sa.Column("id", sa.String(length=40), nullable=False),
        sa.Column("run_id", sa.String(length=40), nullable=False),
        sa.Column("trainer", sa.Text(), nullable=False),
        sa.Column("state", sa.String(length=12), nullable=False),
        sa.Column("base_version", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("lease_expires_at", sa.Float(), nullable=False),
        sa.Column("committed_version", sa.Integer(), nullable=True),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_claims_run_id_runs")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_claims")),
    )
    op.create_index(op.f("ix_claims_state_lease_expires_at"), "claims", ["state", "lease_expires_at"])

    op.create_table(
        "events",
        sa.Column("id", BIG, autoincrement=True, nullable=False),
        sa.Column("run_id", sa.String(length=40), nullable=True),
        sa.Column("kind", sa.String(length=48), nullable=False),
        sa.Column("data", sa.JSON(), nullable=False),
        sa.Column("created_at", sa.Float(), server_default=sa.text("0"), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_events_run_id_runs")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_events")),
    )
    op.create_index(op.f("ix_events_run_id_id"), "events", ["run_id", "id"])

    op.create_table(
        "groups",
        sa.Column("id", sa.String(length=40), nullable=False),
        sa.Column("run_id", sa.String(length=40), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("size", sa.Integer(), nullable=True),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_groups_run_id_runs")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_groups")),
        sa.UniqueConstraint("run_id", "name", name=op.f("uq_groups_run_id_name")),
    )
    op.create_table(
        "policy_versions",
        sa.Column("run_id", sa.String(length=40), nullable=False),
        sa.Column("version", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("parent_version", sa.Integer(), nullable=True),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("weights_uri", sa.Text(), nullable=True),
        sa.Column("weights_format", sa.String(length=32), nullable=True),
        sa.Column("weights_sha256", sa.String(length=64), nullable=True),
        sa.Column("weights_bytes", BIG, nullable=True),
        sa.Column("claim_ids", sa.JSON(), nullable=False),
        sa.Column("config_hash", sa.String(length=64), nullable=True),
        sa.Column("seed", BIG, nullable=True),
        sa.Column("metrics", sa.JSON(), nullable=False),
        sa.Column("audit", sa.JSON(), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("served_at", sa.Float(), nullable=True),
        sa.Column("swap_seconds", sa.Float(), nullable=True),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_policy_versions_run_id_runs")),
        sa.PrimaryKeyConstraint("run_id", "version", name=op.f("pk_policy_versions")),
    )
    op.create_table(
        "sessions",
        sa.Column("id", sa.String(length=40), nullable=False),
        sa.Column("run_id", sa.String(length=40), nullable=False),
        sa.Column("external_id", sa.Text(), nullable=True),
        sa.Column("group_id", sa.String(length=40), nullable=True),
        sa.Column("key_id", sa.String(length=40), nullable=True),
        sa.Column("task", sa.Text(), nullable=True),
        sa.Column("purpose", sa.String(length=8), nullable=False),
        sa.Column("metadata", sa.JSON(), nullable=True),
        sa.Column("attributed_by", sa.String(length=32), nullable=False),
        sa.Column("state", sa.String(length=8), nullable=False),
        sa.Column("training", sa.String(length=12), nullable=False),
        sa.Column("outcome", sa.String(length=16), nullable=True),
        sa.Column("end_reason", sa.String(length=16), nullable=True),
        sa.Column("turn_count", sa.Integer(), nullable=False),
        sa.Column("reward", sa.Float(), nullable=True),
        sa.Column("oldest_version", sa.Integer(), nullable=True),
        sa.Column("newest_version", sa.Integer(), nullable=True),
        sa.Column("idle_seconds", sa.Float(), nullable=True),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("last_active_at", sa.Float(), nullable=False),
        sa.Column("ended_at", sa.Float(), nullable=True),
        sa.Column("ready_at", sa.Float(), nullable=True),
        sa.Column("claim_id", sa.String(length=40), nullable=True),
        sa.Column("consumed_by", sa.Integer(), nullable=True),
        sa.CheckConstraint("state IN ('open', 'ended')", name=op.f("ck_sessions_state")),
        sa.CheckConstraint(
            "training IN ('pending', 'ready', 'leased', 'consumed', 'stale', 'expired', 'excluded')",
            name=op.f("ck_sessions_training"),
        ),
        sa.ForeignKeyConstraint(["claim_id"], ["claims.id"], name=op.f("fk_sessions_claim_id_claims")),
        sa.ForeignKeyConstraint(["group_id"], ["groups.id"], name=op.f("fk_sessions_group_id_groups")),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_sessions_run_id_runs")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_sessions")),
    )
    op.create_index(op.f("ix_sessions_claim_id"), "sessions", ["claim_id"])
    op.create_index(op.f("ix_sessions_group_id_training_ended_at"), "sessions", ["group_id", "training", "ended_at"])
    op.create_index(op.f("ix_sessions_run_id_created_at"), "sessions", ["run_id", "created_at"])
    op.create_index(op.f("ix_sessions_run_id_ended_at"), "sessions", ["run_id", "ended_at"])
    op.create_index(
        op.f("ix_sessions_run_id_external_id_created_at"), "sessions", ["run_id", "external_id", "created_at"]
    )
    op.create_index(
        op.f("ix_sessions_run_id_training_ready_at_id"), "sessions", ["run_id", "training", "ready_at", "id"]
    )
    op.create_index(op.f("ix_sessions_state_last_active_at"), "sessions", ["state", "last_active_at"])
    op.create_index(
        "uq_sessions_open_name",
        "sessions",
        ["run_id", "external_id"],
        unique=True,
        sqlite_where=sa.text("state = 'open'"),
        postgresql_where=sa.text("state = 'open'"),
    )

    op.create_table(
        "api_keys",
        sa.Column("id", sa.String(length=40), nullable=False),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("digest", sa.LargeBinary(length=32), nullable=False),
        sa.Column("run_id", sa.String(length=40), nullable=True),
        sa.Column("session_id", sa.String(length=40), nullable=True),
        sa.Column("label", sa.Text(), nullable=True),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("revoked_at", sa.Float(), nullable=True),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_api_keys_run_id_runs")),
        sa.ForeignKeyConstraint(["session_id"], ["sessions.id"], name=op.f("fk_api_keys_session_id_sessions")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_api_keys")),
        sa.UniqueConstraint("digest", name=op.f("uq_api_keys_digest")),
    )
    op.create_index(op.f("ix_api_keys_run_id"), "api_keys", ["run_id"])

    op.create_table(
        "claimed_sessions",
        sa.Column("claim_id", sa.String(length=40), nullable=False),
        sa.Column("session_id", sa.String(length=40), nullable=False),
        sa.Column("position", sa.Integer(), nullable=False),
        sa.Column("reward", sa.Float(), nullable=True),
        sa.Column("reward_ids", sa.JSON(), nullable=False),
        sa.Column("turn_count", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(["claim_id"], ["claims.id"], name=op.f("fk_claimed_sessions_claim_id_claims")),
        sa.ForeignKeyConstraint(
            ["session_id"], ["sessions.id"], name=op.f("fk_claimed_sessions_session_id_sessions")
        ),
        sa.PrimaryKeyConstraint("claim_id", "session_id", name=op.f("pk_claimed_sessions")),
    )
    op.create_index(op.f("ix_claimed_sessions_session_id"), "claimed_sessions", ["session_id"])

    op.create_table(
        "turns",
        sa.Column("id", sa.String(length=40), nullable=False),
        sa.Column("run_id", sa.String(length=40), nullable=False),
        sa.Column("session_id", sa.String(length=40), nullable=False),
        sa.Column("ordinal", sa.Integer(), nullable=False),
        sa.Column("parent_id", sa.String(length=40), nullable=True),
        sa.Column("prefix_tokens", sa.Integer(), nullable=False),
        sa.Column("prompt_ids", sa.LargeBinary(), nullable=False),
        sa.Column("output_ids", sa.LargeBinary(), nullable=False),
        sa.Column("output_logprobs", sa.LargeBinary(), nullable=False),
        sa.Column("spans", sa.JSON(), nullable=False),
        sa.Column("sampling", sa.JSON(), nullable=False),
        sa.Column("finish_reason", sa.String(length=16), nullable=False),
        sa.Column("continuation", sa.String(length=12), nullable=False),
        sa.Column("state", sa.String(length=12), nullable=False),
        sa.Column("attributed_by", sa.String(length=32), nullable=False),
        sa.Column("conversation_hash", sa.LargeBinary(length=16), nullable=False),
        sa.Column("settled_hash", sa.LargeBinary(length=16), nullable=True),
        sa.Column("tools_hash", sa.LargeBinary(length=16), nullable=False),
        sa.Column("idempotency_key", sa.Text(), nullable=True),
        sa.Column("prompt_token_count", sa.Integer(), nullable=False),
        sa.Column("started_at", sa.Float(), nullable=False),
        sa.Column("first_token_at", sa.Float(), nullable=True),
        sa.Column("finished_at", sa.Float(), nullable=False),
        sa.Column("messages", sa.JSON(), nullable=False),
        sa.Column("request", sa.JSON(), nullable=False),
        sa.Column("response", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(["parent_id"], ["turns.id"], name=op.f("fk_turns_parent_id_turns")),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_turns_run_id_runs")),
        sa.ForeignKeyConstraint(["session_id"], ["sessions.id"], name=op.f("fk_turns_session_id_sessions")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_turns")),
        sa.UniqueConstraint("session_id", "idempotency_key", name=op.f("uq_turns_session_id_idempotency_key")),
    )
    op.create_index(op.f("ix_turns_run_id_conversation_hash"), "turns", ["run_id", "conversation_hash"])
    op.create_index(
        op.f("ix_turns_run_id_settled_hash"),
        "turns",
        ["run_id", "settled_hash"],
        sqlite_where=sa.text("settled_hash IS NOT NULL"),
        postgresql_where=sa.text("settled_hash IS NOT NULL"),
    )
    op.create_index(op.f("ix_turns_session_id_conversation_hash"), "turns", ["session_id", "conversation_hash"])
    op.create_index(op.f("ix_turns_session_id_ordinal"), "turns", ["session_id", "ordinal"])

    op.create_table(
        "rewards",
        sa.Column("sequence", BIG, autoincrement=True, nullable=False),
        sa.Column("id", sa.String(length=40), nullable=False),
        sa.Column("run_id", sa.String(length=40), nullable=False),
        sa.Column("session_id", sa.String(length=40), nullable=False),
        sa.Column("turn_id", sa.String(length=40), nullable=True),
        sa.Column("name", sa.String(length=128), nullable=False),
        sa.Column("value", sa.Float(), nullable=False),
        sa.Column("source", sa.String(length=128), nullable=False),
        sa.Column("comment", sa.Text(), nullable=True),
        sa.Column("idempotency_key", BYTE_ORDERED, nullable=True),
        sa.Column("after_training", sa.Boolean(), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_rewards_run_id_runs")),
        sa.ForeignKeyConstraint(["session_id"], ["sessions.id"], name=op.f("fk_rewards_session_id_sessions")),
        sa.ForeignKeyConstraint(["turn_id"], ["turns.id"], name=op.f("fk_rewards_turn_id_turns")),
        sa.PrimaryKeyConstraint("sequence", name=op.f("pk_rewards")),
        sa.UniqueConstraint("id", name=op.f("uq_rewards_id")),
        sa.UniqueConstraint("run_id", "idempotency_key", name=op.f("uq_rewards_run_id_idempotency_key")),
    )
    op.create_index(op.f("ix_rewards_run_id_created_at"), "rewards", ["run_id", "created_at"])
    op.create_index(op.f("ix_rewards_session_id"), "rewards", ["session_id"])


def downgrade() -> None:
    op.drop_table("rewards")
    op.drop_table("turns")
    op.drop_table("claimed_sessions")
    op.drop_table("api_keys")
    op.drop_table("sessions")
    op.drop_table("policy_versions")
    op.drop_table("groups")
    op.drop_table("events")
    op.drop_table("claims")
    op.drop_table("runs")
