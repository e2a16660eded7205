"""Texts about sessions and turns, as stored."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from sqlalchemy import Connection, select

from proxy.database.prepared import Prepared, among
from proxy.database.tables import FeedbackTextRow


class FeedbackEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A text about a session, or about its turn `turn_id`. `after_training`: it arrived after a trainer had claimed
    the session."""

    id: str
    turn_id: str | None
    text: str
    source: str
    after_training: bool
    created_at: float


def sessions_with_texts(connection: Connection, session_ids: Sequence[str]) -> set[str]:
    """Return the sessions that have a text about them or about one of their turns."""
    if not session_ids:
        return set()
    return {row[0] for row in _DESCRIBED.run(connection, {"ids": session_ids})}


def texts_of(connection: Connection, session_ids: Sequence[str]) -> dict[str, tuple[FeedbackEntry, ...]]:
    """Return the texts of each session in order of arrival; sessions without texts are omitted."""
    found: dict[str, tuple[FeedbackEntry, ...]] = {}
    if session_ids:
        for session_id, *row in _TEXTS.run(connection, {"ids": session_ids}):
            entry = FeedbackEntry(**dict(zip(FeedbackEntry.__struct_fields__, row, strict=True)))
            found[session_id] = (*found.get(session_id, ()), entry)
    return found


_AMONG = among(FeedbackTextRow.session_id, "ids")

_DESCRIBED = Prepared(select(FeedbackTextRow.session_id).where(_AMONG).distinct())

_TEXTS = Prepared(
    select(FeedbackTextRow.session_id, *(getattr(FeedbackTextRow, name) for name in FeedbackEntry.__struct_fields__))
    .where(_AMONG)
    .order_by(FeedbackTextRow.sequence)
)
