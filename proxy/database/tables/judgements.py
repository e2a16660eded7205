"""The table of judgements."""

from __future__ import annotations

from typing import Any

from sqlalchemy import JSON, Boolean, Float, ForeignKey, Index, Integer, String, Text, text
from sqlalchemy.orm import Mapped, mapped_column

from proxy.database.tables.base import Base, Identifier

_SCORED = text("reward_id IS NOT NULL")


class JudgementRow(Base):
    """The result of one attempt of a judge at a session, or at one of its turns: a reward, an error, or neither if
    the judge said that it cannot tell.

    Append-only, except that erasure of the session removes `error` and replaces `digest`. An attempt that failed has
    no reward, and counts in the judge's cost all the same. An attempt at several sessions together has a row for
    each, with equal shares of the cost. The rationale is the reward's comment.
    """

    __tablename__ = "judgements"
    __table_args__ = (
        Index(None, "run_id", "judge", "created_at"),
        Index(None, "session_id"),
        # One reward for a judge in one form and one content: an attempt that runs twice cannot count twice.
        Index(
            "uq_judgements_scored",
            "session_id",
            "judge",
            "fingerprint",
            "digest",
            unique=True,
            sqlite_where=_SCORED,
            postgresql_where=_SCORED,
        ),
    )

    id: Mapped[str] = mapped_column(Identifier, primary_key=True)
    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id"))
    session_id: Mapped[str] = mapped_column(ForeignKey("sessions.id"))
    turn_id: Mapped[str | None] = mapped_column(Identifier)
    """The turn that was judged; null for the whole session."""
    judge: Mapped[str] = mapped_column(String(64))
    fingerprint: Mapped[str] = mapped_column(String(16))
    """Hash of the settings and the prompt that determine the score (`judges.fingerprint`)."""
    digest: Mapped[str] = mapped_column(String(64))
    """Hash of the conversation that was judged; the row's id after the session was erased."""
    reward_id: Mapped[str | None] = mapped_column(Identifier)
    """The ledger entry. No foreign key: rewards are deleted with their session alone, as are judgements."""
    score: Mapped[float | None] = mapped_column(Float)
    votes: Mapped[list[Any] | None] = mapped_column(JSON(none_as_null=True))
    """The scores of the valid answers, in the order in which they were asked for."""
    invalid_votes: Mapped[int] = mapped_column(Integer)
    spread: Mapped[float | None] = mapped_column(Float)
    """The highest vote minus the lowest."""
    is_cut: Mapped[bool] = mapped_column(Boolean)
    """Whether the judge was shown a part of the conversation only, because it is long."""
    prompt_tokens: Mapped[int] = mapped_column(Integer)
    completion_tokens: Mapped[int] = mapped_column(Integer)
    cost: Mapped[float | None] = mapped_column(Float)
    """In the currency of the provider's prices; null without prices."""
    error: Mapped[str | None] = mapped_column(Text)
    created_at: Mapped[float] = mapped_column(Float)
