"""Tables of sessions, their groups, and the users on whose behalf they ran."""

from __future__ import annotations

from sqlalchemy import (
    Boolean,
    CheckConstraint,
    Float,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    String,
    Text,
    UniqueConstraint,
    text,
)
from sqlalchemy.orm import Mapped, mapped_column

from proxy.database.tables.base import Base, Identifier, Json


class GroupRow(Base):
    """Sessions that attempt the same task. `size` is the expected number of them; null if unknown."""

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

    The row of an erased session stays, as a record of what was trained; its content is removed.
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
    """The client's own name for the session. At most one open session of the run has it, and any number of ended
    ones."""
    attempt: Mapped[int] = mapped_column(Integer, server_default=text("1"))
    """The position among the run's sessions of the same `external_id`, from 1; 1 for a session without a name."""
    group_id: Mapped[str | None] = mapped_column(ForeignKey("groups.id"))
    key_id: Mapped[str | None] = mapped_column(Identifier)
    """The run key whose call opened the session. A conversation is continued only by calls with the same key."""
    task: Mapped[str | None] = mapped_column(Text)
    purpose: Mapped[str] = mapped_column(String(8))  # train | eval
    metadata_: Mapped[Json | None] = mapped_column("metadata")
    attributed_by: Mapped[str] = mapped_column(String(32))
    """What made the session known (`sessions.identification.AttributedBy`)."""
    state: Mapped[str] = mapped_column(String(8))
    training: Mapped[str] = mapped_column(String(12))
    outcome: Mapped[str | None] = mapped_column(String(16))  # completed | failed | cancelled
    end_reason: Mapped[str | None] = mapped_column(String(16))  # reward | explicit | idle
    turn_count: Mapped[int] = mapped_column(Integer, default=0)
    reward: Mapped[float | None] = mapped_column(Float)
    """The combined session reward as of now, derived from the ledger."""
    revised_at: Mapped[float | None] = mapped_column(Float)
    """Set for a consumed session whose rewards, its own or a turn's, now differ from those it was trained with: the
    time of the newest reward that was not trained. Null otherwise."""
    oldest_version: Mapped[int | None] = mapped_column(Integer)
    newest_version: Mapped[int | None] = mapped_column(Integer)
    idle_seconds: Mapped[float | None] = mapped_column(Float)
    """The idle time-out that the session's creator set (`ttl`); null means the run's."""
    created_at: Mapped[float] = mapped_column(Float)
    last_active_at: Mapped[float] = mapped_column(Float)
    ended_at: Mapped[float | None] = mapped_column(Float)
    ready_at: Mapped[float | None] = mapped_column(Float)
    claim_id: Mapped[str | None] = mapped_column(ForeignKey("claims.id"))
    consumed_by: Mapped[int | None] = mapped_column(Integer)
    erased_at: Mapped[float | None] = mapped_column(Float)
    """The time of erasure. From then on the session takes no calls or rewards, is not continued and is not
    claimed."""
    erased_reason: Mapped[str | None] = mapped_column(String(16))  # requested | retention
    emptied_at: Mapped[float | None] = mapped_column(Float)
    """The time at which the last content of an erased session was removed."""
    origin: Mapped[str | None] = mapped_column(Identifier)
    """The id of an imported session in the store that it was exported from."""
    held_back: Mapped[bool] = mapped_column(Boolean, server_default=text("false"))
    """Excluded from training, whatever its rewards: imported but not for training, or answered by a version that was
    rolled back."""
    first_message: Mapped[bytes | None] = mapped_column(LargeBinary(16))
    """Hash of the first message of a user (`turns.first_messages`); null without one, and after erasure."""


class SessionUserRow(Base):
    """A user on whose behalf a session's calls were made, so that a person's data can be found and erased.

    `digest` is a keyed hash of the `user` that the agent sent (`auth/users.py`); the name itself is not stored.
    """

    __tablename__ = "session_users"
    __table_args__ = (Index(None, "digest", "run_id"),)

    session_id: Mapped[str] = mapped_column(ForeignKey("sessions.id"), primary_key=True)
    digest: Mapped[bytes] = mapped_column(LargeBinary(16), primary_key=True)
    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id"))
