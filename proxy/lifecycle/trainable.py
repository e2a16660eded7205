"""The query for sessions with a trainable turn: the rule of `turns.assembly.trainable_turns` in SQL.

A test compares both.
"""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import Connection, and_, bindparam, exists, func, or_, select
from sqlalchemy.orm import aliased

from proxy.contract.turn import TurnState
from proxy.database.tables import SessionRow, TurnRow

_NEXT = aliased(TurnRow)


def teaching_sessions(connection: Connection, session_ids: Sequence[str]) -> set[str]:
    """Return the sessions that have at least one turn that can be trained.

    In a transaction that changes sessions, call it after they are locked: a statement that waits for a lock still
    sees the turns as they were before the wait.
    """
    if not session_ids:
        return set()
    return set(connection.execute(_TEACHING, {"ids": list(session_ids)}).scalars())


_IS_CONTINUED = (
    exists()
    .where(
        _NEXT.session_id == TurnRow.session_id,
        _NEXT.parent_id == TurnRow.id,
        _NEXT.prefix_tokens > TurnRow.prompt_token_count,
        or_(SessionRow.ended_at.is_(None), _NEXT.started_at <= SessionRow.ended_at),
    )
    # Two levels deep, SQLAlchemy does not correlate by itself: it would join all sessions here once more.
    .correlate(TurnRow, SessionRow)
)

_TEACHES = exists().where(
    TurnRow.session_id == SessionRow.id,
    or_(
        TurnRow.state == TurnState.COMPLETE.value,
        TurnRow.state == TurnState.SHADOW.value,
        and_(TurnRow.state == TurnState.TRUNCATED.value, _IS_CONTINUED),
    ),
    func.length(TurnRow.output_logprobs) > 0,
    func.coalesce(TurnRow.sampling["temperature"].as_float(), 1.0) != 0.0,
    or_(SessionRow.ended_at.is_(None), TurnRow.started_at <= SessionRow.ended_at),
)

_TEACHING = select(SessionRow.id).where(SessionRow.id.in_(bindparam("ids", expanding=True)), _TEACHES)
