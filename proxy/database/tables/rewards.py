"""Tables of the reward ledger, of preferences and of texts. All are append-only."""

from __future__ import annotations

from sqlalchemy import (
    Boolean,
    Float,
    ForeignKey,
    Index,
    String,
    Text,
    UniqueConstraint,
    text,
)
from sqlalchemy.orm import Mapped, mapped_column

from proxy.database.tables.base import Base, Big, ByteOrdered, Identifier

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
    """Order of arrival: a later reward of the same name, source and subject supersedes an earlier one."""
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
    """Whether a trainer had the session when the reward arrived. If the session was then consumed, the reward was not
    trained on."""
    created_at: Mapped[float] = mapped_column(Float)


class PreferenceRow(Base):
    """A statement that one session or turn is better than another of the same run. Append-only."""

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


class FeedbackTextRow(Base):
    """A text about a session, or about one of its turns. Append-only; the erasure of the session deletes it."""

    __tablename__ = "feedback_texts"
    __table_args__ = (
        Index(None, "session_id"),
        Index(None, "run_id", "created_at"),
        UniqueConstraint("run_id", "idempotency_key"),
    )

    sequence: Mapped[int] = mapped_column(Big, primary_key=True, autoincrement=True)
    """Order of arrival, in which several texts about the same subject are read."""
    id: Mapped[str] = mapped_column(Identifier, unique=True)
    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id"))
    session_id: Mapped[str] = mapped_column(ForeignKey("sessions.id"))
    turn_id: Mapped[str | None] = mapped_column(ForeignKey("turns.id"))
    text: Mapped[str] = mapped_column(Text)
    source: Mapped[str] = mapped_column(String(128))
    idempotency_key: Mapped[str | None] = mapped_column(ByteOrdered)
    after_training: Mapped[bool] = mapped_column(Boolean)
    """Whether a trainer had the session when the text arrived."""
    created_at: Mapped[float] = mapped_column(Float)
