"""Tables of claims, policy versions, and the audit of training steps."""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    JSON,
    Boolean,
    Float,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    String,
    Text,
    text,
)
from sqlalchemy.orm import Mapped, mapped_column

from proxy.database.tables.base import Base, Big, Identifier, Json


class ClaimRow(Base):
    """A lease of sessions to a trainer. `state`: leased | committed | released | expired."""

    __tablename__ = "claims"
    __table_args__ = (Index(None, "state", "lease_expires_at"),)

    id: Mapped[str] = mapped_column(Identifier, primary_key=True)
    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id"))
    trainer: Mapped[str] = mapped_column(Text)
    process: Mapped[str | None] = mapped_column(String(64))
    """The trainer's process. Once it is known to be dead, its claims are released before their leases expire."""
    state: Mapped[str] = mapped_column(String(12))
    base_version: Mapped[int] = mapped_column(Integer)
    created_at: Mapped[float] = mapped_column(Float)
    lease_expires_at: Mapped[float] = mapped_column(Float)
    committed_version: Mapped[int | None] = mapped_column(Integer)
    reward_rules: Mapped[Json | None] = mapped_column(JSON(none_as_null=True))
    """The rules by which the rewards of the claim were combined. They stay when the run's rules change."""


class ClaimedSessionRow(Base):
    """A session in a claim, with its rewards as of the claim: the lineage of a training step."""

    # No foreign keys: for each row, PostgreSQL would look up the claim and the session again and lock the session's
    # row. Both rows belong to the same transaction and are never deleted.

    __tablename__ = "claimed_sessions"
    __table_args__ = (Index(None, "session_id"),)

    claim_id: Mapped[str] = mapped_column(Identifier, primary_key=True)
    session_id: Mapped[str] = mapped_column(Identifier, primary_key=True)
    position: Mapped[int] = mapped_column(Integer)
    reward: Mapped[float | None] = mapped_column(Float)
    reward_ids: Mapped[list[Any]]
    turn_rewards: Mapped[Json | None] = mapped_column(JSON(none_as_null=True))
    """Combined reward by turn id, as of the claim. Null in claims older than this column."""
    turn_count: Mapped[int] = mapped_column(Integer)
    """The number of turns in the claim. A call still running at that time is recorded later with a higher ordinal."""


class PolicyVersionRow(Base):
    """A policy version. `state` is a `contract.policy.VersionState`. Version 0 is the base model,
    without weights of its own, or has the weights of another run's version, from which the run began."""

    # The primary key makes a version's successor unique: of two commits on the same parent, one fails.

    __tablename__ = "policy_versions"

    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id"), primary_key=True)
    version: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    parent_version: Mapped[int | None] = mapped_column(Integer)
    state: Mapped[str] = mapped_column(String(16))
    weights_uri: Mapped[str | None] = mapped_column(Text)
    weights_format: Mapped[str | None] = mapped_column(String(32))
    weights_sha256: Mapped[str | None] = mapped_column(String(64))
    weights_bytes: Mapped[int | None] = mapped_column(Big)
    weights_removed_at: Mapped[float | None] = mapped_column(Float)
    """The time from which its weights may be missing on disk (`versions/retention.py`)."""
    weights_files: Mapped[Json | None] = mapped_column(JSON(none_as_null=True))
    """SHA-256 of every file by path; null for versions older than this column."""
    is_saved: Mapped[bool] = mapped_column(Boolean, default=True, server_default=text("true"))
    """Whether its directory is on the disk. Until then it is in its trainer's memory, and its claims stay leased."""
    offer: Mapped[Json | None] = mapped_column(JSON(none_as_null=True))
    """How engines get it from its trainer (`contract.exchange.Offer`); null if they do not, and once it is saved."""
    rejected_because: Mapped[str | None] = mapped_column(Text)
    rejected_at: Mapped[float | None] = mapped_column(Float)
    """The reason and the time of the rejection, or of the rollback."""
    engine_deaths: Mapped[int] = mapped_column(Integer, default=0, server_default="0")
    """The number of engines that stopped while loading it or soon after (`serving/faults.py`)."""
    claim_ids: Mapped[list[Any]]
    config_hash: Mapped[str | None] = mapped_column(String(64))
    seed: Mapped[int | None] = mapped_column(Big)
    metrics: Mapped[Json]
    audit: Mapped[list[Any]]
    inputs: Mapped[Json | None] = mapped_column(JSON(none_as_null=True))
    """`contract.step.StepInputs`; null if the trainer did not send it."""
    probe: Mapped[Json | None] = mapped_column(JSON(none_as_null=True))
    """`contract.policy.Probe`; null for a base model, and if the trainer did not send it."""
    asked_at: Mapped[float | None] = mapped_column(Float)
    """When a call last asked for this version by its number, up to half a minute late: proxies do not unload an
    adapter that another proxy's calls still name (`serving/older_versions.py`)."""
    created_at: Mapped[float] = mapped_column(Float)
    shadow_at: Mapped[float | None] = mapped_column(Float)
    """When it began to answer a share of the prompts unseen."""
    canary_at: Mapped[float | None] = mapped_column(Float)
    """When it began to answer a share of new sessions."""
    served_at: Mapped[float | None] = mapped_column(Float)
    swap_seconds: Mapped[float | None] = mapped_column(Float)
    """How long generation paused for the swap to this version."""


class TokenAuditRow(Base):
    """A trained turn token by token (`contract.step.TokenAudit`), for the few trajectories of a step that are
    sampled.

    Arrays of float32 and int32; `clipped` has one byte per token.
    """

    __tablename__ = "token_audits"
    __table_args__ = (Index(None, "session_id"),)

    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id"), primary_key=True)
    version: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    turn_id: Mapped[str] = mapped_column(Identifier, primary_key=True)
    session_id: Mapped[str] = mapped_column(Identifier)
    logprobs: Mapped[bytes] = mapped_column(LargeBinary)
    engine_logprobs: Mapped[bytes] = mapped_column(LargeBinary)
    advantages: Mapped[bytes] = mapped_column(LargeBinary)
    staleness: Mapped[bytes] = mapped_column(LargeBinary)
    clipped: Mapped[bytes] = mapped_column(LargeBinary)
