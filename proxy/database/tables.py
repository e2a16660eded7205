"""The tables of the trajectory store. Times are seconds since the epoch, UTC; ids come from `contract.identifiers`.

Token ids are int32 and log-probabilities float32, little-endian, packed into blobs (`contract/arrays.py`).
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    CheckConstraint,
    Float,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Text,
    UniqueConstraint,
    text,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from proxy.database.packed_json import PackedJson

NAMING = {
    "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    "ck": "ck_%(table_name)s_%(constraint_name)s",
    "fk": "fk_%(table_name)s_%(column_0_N_name)s_%(referred_table_name)s",
    "pk": "pk_%(table_name)s",
}

Identifier = String(40)
Big = BigInteger().with_variant(Integer(), "sqlite")
"""Whole numbers beyond 32 bits, which any integer of SQLite may be."""

ByteOrdered = Text().with_variant(Text(collation="C"), "postgresql")
"""Text that is looked for by ranges: in the order of its bytes, whatever the database's language is."""

Json = dict[str, Any]


class Base(DeclarativeBase):
    metadata = MetaData(naming_convention=NAMING)
    type_annotation_map = {Json: JSON, list[Any]: JSON}  # noqa: RUF012  (SQLAlchemy's own declaration)


class RunRow(Base):
    """A policy being trained. `head_version` is what the trainer continues from, `serving_version` what engines
    should hold; engines are brought to it (`serving/reconciler.py`)."""

    __tablename__ = "runs"

    id: Mapped[str] = mapped_column(Identifier, primary_key=True)
    name: Mapped[str] = mapped_column(String(64), unique=True)
    state: Mapped[str] = mapped_column(String(16))  # active | paused | archived
    base_model: Mapped[str] = mapped_column(Text)
    config: Mapped[Json]
    head_version: Mapped[int] = mapped_column(Integer)
    serving_version: Mapped[int] = mapped_column(Integer)
    created_at: Mapped[float] = mapped_column(Float)
    reward_rules: Mapped[Json | None] = mapped_column(JSON(none_as_null=True))
    """By which the rewards of all its untrained sessions are combined (`contract.reward.RewardRules`); where they are
    not those of `config`, `feedback/rules.py` has yet to go through the sessions."""


class ApiKeyRow(Base):
    """A bearer key, kept as the HMAC of its text. Session keys carry their session."""

    __tablename__ = "api_keys"
    __table_args__ = (Index(None, "run_id"),)

    id: Mapped[str] = mapped_column(Identifier, primary_key=True)
    kind: Mapped[str] = mapped_column(String(16))  # admin | run | session | trainer
    digest: Mapped[bytes] = mapped_column(LargeBinary(32), unique=True)
    run_id: Mapped[str | None] = mapped_column(ForeignKey("runs.id"))
    session_id: Mapped[str | None] = mapped_column(ForeignKey("sessions.id"))
    label: Mapped[str | None] = mapped_column(Text)
    created_at: Mapped[float] = mapped_column(Float)
    last_used_at: Mapped[float | None] = mapped_column(Float)
    """A minute old at most; null for session keys, which are not followed."""
    revoked_at: Mapped[float | None] = mapped_column(Float)
    """In the future while a key that was replaced still works."""


class SignOutRow(Base):
    """A sign-in to the admin page that was ended before its cookie expires (`admin/sign_in.py`)."""

    __tablename__ = "sign_outs"

    sign_in: Mapped[str] = mapped_column(Identifier, primary_key=True)
    until: Mapped[float] = mapped_column(Float)
    """When the cookie expires by itself, and this row may go."""


class GroupRow(Base):
    """Sessions that attempt the same task. `size` is how many are expected; None where nobody said."""

    __tablename__ = "groups"
    __table_args__ = (UniqueConstraint("run_id", "name"),)

    id: Mapped[str] = mapped_column(Identifier, primary_key=True)
    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id"))
    name: Mapped[str] = mapped_column(Text)
    size: Mapped[int | None] = mapped_column(Integer)
    created_at: Mapped[float] = mapped_column(Float)


_OPEN = text("state = 'open'")
_GROUPED = text("group_id IS NOT NULL")
_CLAIMED = text("claim_id IS NOT NULL")
_NAMED = text("external_id IS NOT NULL")
_IMPORTED = text("origin IS NOT NULL")
_REVISED = text("revised_at IS NOT NULL")
_ERASED = text("erased_at IS NOT NULL")
_KEPT = text("erased_at IS NULL")


class SessionRow(Base):
    """One attempt of an agent at one task.

    `state`: open | ended. `training` is where the session stands with the trainer:
      pending    open, or ended and not yet rewarded
      ready      ended and rewarded: claimable
      leased     in a live claim (`claim_id`)
      consumed   trained by version `consumed_by`
      stale      a token was older than the staleness bound at claim time
      expired    no reward came within the run's `reward_timeout_seconds`
      excluded   eval sessions; failed or cancelled without a reward; sessions without a trainable turn; imported
                 ones that are not to be trained; erased ones

    Of an erased session this row stays, as the account of what was trained; its content goes.
    """

    __tablename__ = "sessions"
    __table_args__ = (
        Index(None, "run_id", "training", "ready_at", "id"),
        Index(None, "run_id", "created_at"),
        Index(None, "run_id", "ended_at"),
        Index(None, "group_id", "training", "ended_at", sqlite_where=_GROUPED, postgresql_where=_GROUPED),
        Index(None, "claim_id", sqlite_where=_CLAIMED, postgresql_where=_CLAIMED),
        Index(None, "run_id", "external_id", "attempt", sqlite_where=_NAMED, postgresql_where=_NAMED),
        Index("ix_sessions_revised", "run_id", "revised_at", sqlite_where=_REVISED, postgresql_where=_REVISED),
        Index(
            "uq_sessions_open_name", "run_id", "external_id", unique=True, sqlite_where=_OPEN, postgresql_where=_OPEN
        ),
        Index("ix_sessions_erased", "erased_at", sqlite_where=_ERASED, postgresql_where=_ERASED),
        Index("ix_sessions_kept", "run_id", "ended_at", sqlite_where=_KEPT, postgresql_where=_KEPT),
        Index(
            "uq_sessions_origin", "run_id", "origin", unique=True, sqlite_where=_IMPORTED, postgresql_where=_IMPORTED
        ),
        CheckConstraint("state IN ('open', 'ended')", name="state"),
        CheckConstraint(
            "training IN ('pending', 'ready', 'leased', 'consumed', 'stale', 'expired', 'excluded')", name="training"
        ),
    )

    id: Mapped[str] = mapped_column(Identifier, primary_key=True)
    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id"))
    external_id: Mapped[str | None] = mapped_column(Text)
    """The client's own name for the session. One open session of the run has it, and any number that ended."""
    attempt: Mapped[int] = mapped_column(Integer, server_default=text("1"))
    """Which of the run's sessions of this `external_id` it is, from 1; 1 for a session without a name."""
    group_id: Mapped[str | None] = mapped_column(ForeignKey("groups.id"))
    key_id: Mapped[str | None] = mapped_column(Identifier)
    """The run key whose call opened the session: conversations match only within one key."""
    task: Mapped[str | None] = mapped_column(Text)
    purpose: Mapped[str] = mapped_column(String(8))  # train | eval
    metadata_: Mapped[Json | None] = mapped_column("metadata")
    attributed_by: Mapped[str] = mapped_column(String(32))
    """How it came into being (`sessions.identification.AttributedBy`)."""
    state: Mapped[str] = mapped_column(String(8))
    training: Mapped[str] = mapped_column(String(12))
    outcome: Mapped[str | None] = mapped_column(String(16))  # completed | failed | cancelled
    end_reason: Mapped[str | None] = mapped_column(String(16))  # reward | explicit | idle
    turn_count: Mapped[int] = mapped_column(Integer, default=0)
    reward: Mapped[float | None] = mapped_column(Float)
    """The combined session reward as of now; the ledger is the truth."""
    revised_at: Mapped[float | None] = mapped_column(Float)
    """Of a consumed session whose rewards, its own or a turn's, come to something else now than what was trained:
    when the newest entry came that was not. Null otherwise."""
    oldest_version: Mapped[int | None] = mapped_column(Integer)
    newest_version: Mapped[int | None] = mapped_column(Integer)
    idle_seconds: Mapped[float | None] = mapped_column(Float)
    """Idle time-out of this session where its creator set one (`ttl`); the run's otherwise."""
    created_at: Mapped[float] = mapped_column(Float)
    last_active_at: Mapped[float] = mapped_column(Float)
    ended_at: Mapped[float | None] = mapped_column(Float)
    ready_at: Mapped[float | None] = mapped_column(Float)
    claim_id: Mapped[str | None] = mapped_column(ForeignKey("claims.id"))
    consumed_by: Mapped[int | None] = mapped_column(Integer)
    erased_at: Mapped[float | None] = mapped_column(Float)
    """Since when it takes no calls and no rewards, is nobody's parent and is not handed out any more."""
    erased_reason: Mapped[str | None] = mapped_column(String(16))  # requested | retention
    emptied_at: Mapped[float | None] = mapped_column(Float)
    """When the last of an erased session's content was gone."""
    origin: Mapped[str | None] = mapped_column(Identifier)
    """Of an imported session, its id in the store that it was exported from."""
    held_back: Mapped[bool] = mapped_column(Boolean, server_default=text("false"))
    """Imported without being meant for training: excluded, whatever its rewards."""


class SessionUserRow(Base):
    """On whose behalf a session's calls were made, so that what is known of a person can be found and erased.

    `digest` is a keyed hash of what the agent sent as `user` (`auth/users.py`): the name itself is not kept.
    """

    __tablename__ = "session_users"
    __table_args__ = (Index(None, "digest", "run_id"),)

    session_id: Mapped[str] = mapped_column(ForeignKey("sessions.id"), primary_key=True)
    digest: Mapped[bytes] = mapped_column(LargeBinary(16), primary_key=True)
    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id"))


NO_CONVERSATION = b""
"""The `conversation_hash` of a turn whose content was erased; no real conversation hashes to it."""

_SETTLED = text("settled_hash IS NOT NULL")
_KEYED = text("idempotency_key IS NOT NULL")


class TurnRow(Base):
    """One model call (`contract.turn.Turn`), with the request and answer as JSON for people.

    `messages` are those the call added to its parent's conversation; `request` is the rest of the body, and null
    where that is the same as of the turn `request_of`. A turn is inserted once, when its answer is whole or given up;
    a turn is never updated afterwards. The three JSON columns are the last, as SQLite reads a long row up to the last
    column that is asked for.
    """

    __tablename__ = "turns"
    __table_args__ = (
        Index(None, "session_id", "ordinal"),
        Index(None, "conversation_hash", "session_id"),
        Index(None, "settled_hash", sqlite_where=_SETTLED, postgresql_where=_SETTLED),
        Index(
            "uq_turns_session_id_idempotency_key",
            "session_id",
            "idempotency_key",
            unique=True,
            sqlite_where=_KEYED,
            postgresql_where=_KEYED,
        ),
    )

    id: Mapped[str] = mapped_column(Identifier, primary_key=True)
    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id"))
    session_id: Mapped[str] = mapped_column(ForeignKey("sessions.id"))
    ordinal: Mapped[int] = mapped_column(Integer)
    parent_id: Mapped[str | None] = mapped_column(ForeignKey("turns.id"))
    prefix_tokens: Mapped[int] = mapped_column(Integer)
    prompt_ids: Mapped[bytes] = mapped_column(LargeBinary)
    output_ids: Mapped[bytes] = mapped_column(LargeBinary)
    output_logprobs: Mapped[bytes] = mapped_column(LargeBinary)
    spans: Mapped[list[Any]]  # [[version, start, end], …]
    sampling: Mapped[Json]
    finish_reason: Mapped[str] = mapped_column(String(16))
    continuation: Mapped[str] = mapped_column(String(12))
    state: Mapped[str] = mapped_column(String(12))
    attributed_by: Mapped[str] = mapped_column(String(32))
    """How the call came to its session (`sessions.identification.AttributedBy`)."""
    conversation_hash: Mapped[bytes] = mapped_column(LargeBinary(16))
    """Hash chain over the canonical messages up to and including the answer that was sent."""
    settled_hash: Mapped[bytes | None] = mapped_column(LargeBinary(16))
    """The same without the message that was sent last, where another stands before it that is to be answered as well:
    reminders are sent so, and are not there in the next request. Null otherwise."""
    tools_hash: Mapped[bytes] = mapped_column(LargeBinary(16))
    """Of what else the template renders: tools and template arguments. Tokens are reused only where it is equal."""
    idempotency_key: Mapped[str | None] = mapped_column(Text)
    prompt_token_count: Mapped[int] = mapped_column(Integer)
    """Of the full prompt, shared tokens included."""
    started_at: Mapped[float] = mapped_column(Float)
    first_token_at: Mapped[float | None] = mapped_column(Float)
    finished_at: Mapped[float] = mapped_column(Float)
    masked: Mapped[list[Any] | None] = mapped_column(JSON(none_as_null=True))
    """[[start, end), …] in this turn's prompt ids followed by its output ids: redacted, and placeholders stand there.
    Null where nothing is."""
    request_of: Mapped[str | None] = mapped_column(ForeignKey("turns.id"))
    """A turn before it on its path, or the first choice of its call; null for a turn with a request of its own."""
    messages: Mapped[Any] = mapped_column(PackedJson)
    request: Mapped[Any] = mapped_column(PackedJson, nullable=True)
    response: Mapped[Any] = mapped_column(PackedJson)


_LATE, _LATE_IN_SQLITE = text("after_training"), text("after_training = 1")


class RewardRow(Base):
    """The append-only reward ledger (`contract.reward.Reward`)."""

    __tablename__ = "rewards"
    __table_args__ = (
        Index(None, "session_id"),
        Index(None, "run_id", "created_at"),
        Index(None, "run_id", "name", "created_at"),
        Index(None, "run_id", "source", "created_at"),
        Index("ix_rewards_late", "run_id", "created_at", sqlite_where=_LATE_IN_SQLITE, postgresql_where=_LATE),
        UniqueConstraint("run_id", "idempotency_key"),
    )

    sequence: Mapped[int] = mapped_column(Big, primary_key=True, autoincrement=True)
    """Order of arrival: of two entries for the same thing, the later supersedes."""
    id: Mapped[str] = mapped_column(Identifier, unique=True)
    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id"))
    session_id: Mapped[str] = mapped_column(ForeignKey("sessions.id"))
    turn_id: Mapped[str | None] = mapped_column(ForeignKey("turns.id"))
    name: Mapped[str] = mapped_column(String(128))
    value: Mapped[float] = mapped_column(Float)
    source: Mapped[str] = mapped_column(String(128))
    comment: Mapped[str | None] = mapped_column(Text)
    idempotency_key: Mapped[str | None] = mapped_column(ByteOrdered)
    after_training: Mapped[bool] = mapped_column(Boolean)
    """It arrived when a trainer had its session already. Where the session was consumed, it was not trained on."""
    created_at: Mapped[float] = mapped_column(Float)


class PreferenceRow(Base):
    """That one thing is better than another of the same run, each a session or one of its turns. Append-only."""

    __tablename__ = "preferences"
    __table_args__ = (
        Index(None, "chosen_session_id"),
        Index(None, "rejected_session_id"),
        Index(None, "run_id", "created_at"),
        UniqueConstraint("run_id", "idempotency_key"),
    )

    sequence: Mapped[int] = mapped_column(Big, primary_key=True, autoincrement=True)
    id: Mapped[str] = mapped_column(Identifier, unique=True)
    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id"))
    chosen_session_id: Mapped[str] = mapped_column(ForeignKey("sessions.id"))
    chosen_turn_id: Mapped[str | None] = mapped_column(ForeignKey("turns.id"))
    rejected_session_id: Mapped[str] = mapped_column(ForeignKey("sessions.id"))
    rejected_turn_id: Mapped[str | None] = mapped_column(ForeignKey("turns.id"))
    source: Mapped[str] = mapped_column(String(128))
    comment: Mapped[str | None] = mapped_column(Text)
    idempotency_key: Mapped[str | None] = mapped_column(Text)
    created_at: Mapped[float] = mapped_column(Float)


class ClaimRow(Base):
    """A lease of sessions to a trainer. `state`: leased | committed | released | expired."""

    __tablename__ = "claims"
    __table_args__ = (Index(None, "state", "lease_expires_at"),)

    id: Mapped[str] = mapped_column(Identifier, primary_key=True)
    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id"))
    trainer: Mapped[str] = mapped_column(Text)
    process: Mapped[str | None] = mapped_column(String(64))
    """The trainer's process: once it is known to be dead, its claims need not wait for their lease."""
    state: Mapped[str] = mapped_column(String(12))
    base_version: Mapped[int] = mapped_column(Integer)
    created_at: Mapped[float] = mapped_column(Float)
    lease_expires_at: Mapped[float] = mapped_column(Float)
    committed_version: Mapped[int | None] = mapped_column(Integer)
    reward_rules: Mapped[Json | None] = mapped_column(JSON(none_as_null=True))
    """By which the rewards that it handed out were combined: what was trained stays, also when the run's rules
    change."""


class ClaimedSessionRow(Base):
    """Which session a claim handed out, with the reward entries as they were handed out: the step's lineage.

    Claim and session are rows of the same transaction, and neither is ever deleted. Without foreign keys: PostgreSQL
    would look both up again, and write into the session's row, for each of them.
    """

    __tablename__ = "claimed_sessions"
    __table_args__ = (Index(None, "session_id"),)

    claim_id: Mapped[str] = mapped_column(Identifier, primary_key=True)
    session_id: Mapped[str] = mapped_column(Identifier, primary_key=True)
    position: Mapped[int] = mapped_column(Integer)
    reward: Mapped[float | None] = mapped_column(Float)
    reward_ids: Mapped[list[Any]]
    turn_rewards: Mapped[Json | None] = mapped_column(JSON(none_as_null=True))
    """Turn id → the combined reward that was handed out for it. Null in claims older than this column."""
    turn_count: Mapped[int] = mapped_column(Integer)
    """Turns with a smaller ordinal were there; a call still running at the claim is recorded later and not in it."""


class PolicyVersionRow(Base):
    """A policy version. `state`: committed | serving | retired | rejected. Version 0 has no weights of its own: it
    is the base model.

    The primary key makes the successor of a version unique: of two commits on the same parent, one fails.
    """

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
    """Since when its weights may be gone from the disk (`versions/retention.py`)."""
    weights_files: Mapped[Json | None] = mapped_column(JSON(none_as_null=True))
    """SHA-256 of every file by its path; null for versions of before this was kept."""
    rejected_because: Mapped[str | None] = mapped_column(Text)
    rejected_at: Mapped[float | None] = mapped_column(Float)
    engine_deaths: Mapped[int] = mapped_column(Integer, default=0, server_default="0")
    """How many engines stopped while they loaded it or soon after (`serving/reconciler.py`)."""
    claim_ids: Mapped[list[Any]]
    config_hash: Mapped[str | None] = mapped_column(String(64))
    seed: Mapped[int | None] = mapped_column(Big)
    metrics: Mapped[Json]
    audit: Mapped[list[Any]]
    inputs: Mapped[Json | None] = mapped_column(JSON(none_as_null=True))
    """`contract.step.StepInputs`; null where the trainer did not tell."""
    created_at: Mapped[float] = mapped_column(Float)
    served_at: Mapped[float | None] = mapped_column(Float)
    swap_seconds: Mapped[float | None] = mapped_column(Float)
    """How long generation stood still for the swap to this version."""


class TokenAuditRow(Base):
    """A trained turn token by token (`contract.step.TokenAudit`), of the few trajectories of a step that are sampled.

    Float32, int32 and, for `clipped`, one byte a token.
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


class RateLimitRow(Base):
    """How far the allowance of a run is used, by all proxies (`limits/bucket.py`). `kind`: calls | tokens."""

    __tablename__ = "rate_limits"

    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id"), primary_key=True)
    kind: Mapped[str] = mapped_column(String(16), primary_key=True)
    due_at: Mapped[float] = mapped_column(Float)
    """When all that was used will have flowed in."""
    moved_at: Mapped[float] = mapped_column(Float)
    per_minute: Mapped[float] = mapped_column(Float)
    """The limit by which it was used last."""


class WriteProbeRow(Base):
    """One row, written to find out whether the store takes writes (`database/probe.py`)."""

    __tablename__ = "write_probes"

    id: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    at: Mapped[float] = mapped_column(Float)


class EventRow(Base):
    """The event log: what happened, for the page and the audit. Appended in the transaction of what it tells."""

    __tablename__ = "events"
    __table_args__ = (Index(None, "run_id", "id"),)

    id: Mapped[int] = mapped_column(Big, primary_key=True, autoincrement=True)
    run_id: Mapped[str | None] = mapped_column(ForeignKey("runs.id"))
    kind: Mapped[str] = mapped_column(String(48))
    data: Mapped[Json]
    created_at: Mapped[float] = mapped_column(Float, server_default=text("0"))
