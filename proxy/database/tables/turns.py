"""The table of turns."""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    JSON,
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

from proxy.database.packed_json import PackedJson
from proxy.database.tables.base import Base, Identifier, Json

NO_CONVERSATION = b""
"""The `conversation_hash` of a turn whose content was erased; no conversation has this hash."""

_SETTLED = text("settled_hash IS NOT NULL")
_KEYED = text("idempotency_key IS NOT NULL")


class TurnRow(Base):
    """One model call (`contract.turn.Turn`), with its request and answer as JSON.

    `messages` are those that the call added to its parent's conversation; `request` is the rest of the body, null if
    it equals that of the turn `request_of`. A turn is inserted once, when its answer is complete or given up, and
    only erasure changes it afterwards.
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
    """What identified the call's session (`sessions.identification.AttributedBy`)."""
    conversation_hash: Mapped[bytes] = mapped_column(LargeBinary(16))
    """Hash chain over the canonical messages, up to and including the answer that was sent."""
    settled_hash: Mapped[bytes | None] = mapped_column(LargeBinary(16))
    """The hash without the last message of the request, if the message before it needs an answer as well; null
    otherwise. Some agents append a reminder in this way, which the next request does not repeat."""
    tools_hash: Mapped[bytes] = mapped_column(LargeBinary(16))
    """Hash of the tools and template arguments, which the template renders too. Tokens are reused only if it is
    equal."""
    idempotency_key: Mapped[str | None] = mapped_column(Text)
    prompt_token_count: Mapped[int] = mapped_column(Integer)
    """The length of the full prompt, including the tokens shared with the parent."""
    started_at: Mapped[float] = mapped_column(Float)
    first_token_at: Mapped[float | None] = mapped_column(Float)
    finished_at: Mapped[float] = mapped_column(Float)
    masked: Mapped[list[Any] | None] = mapped_column(JSON(none_as_null=True))
    """Ranges [[start, end), …] of redacted tokens, which are placeholders, in the prompt ids followed by the output
    ids. Null if nothing is redacted."""
    request_of: Mapped[str | None] = mapped_column(ForeignKey("turns.id"))
    """An ancestor, or the first choice of the same call; null for a turn with a request of its own."""
    # The large columns come last: SQLite reads a long row only up to the last column of the query.
    messages: Mapped[Any] = mapped_column(PackedJson)
    request: Mapped[Any] = mapped_column(PackedJson, nullable=True)
    response: Mapped[Any] = mapped_column(PackedJson)
