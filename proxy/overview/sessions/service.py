"""Lists of sessions, single sessions and their turns."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from sqlalchemy import Connection

from proxy.contract.states import TrainingState
from proxy.database.rows import AnyRow
from proxy.database.unit_of_work import Database
from proxy.errors import NotFound
from proxy.lifecycle.audits import SessionAudit, session_audit
from proxy.lifecycle.texts import FeedbackEntry, texts_of
from proxy.lifecycle.trainable import teaching_sessions
from proxy.overview.filters import Cursor, SessionFilter, page_size
from proxy.overview.rewards.assembly import preference_view, reward_items, used_by
from proxy.overview.rewards.repository import LedgerRepository
from proxy.overview.sessions.assembly import (
    TokenTextOf,
    decoder_of,
    judgement_view,
    session_item,
    trained,
    turn_view,
    untrained,
)
from proxy.overview.sessions.repository import SessionOverviewRepository
from proxy.overview.sessions.views import SessionItem, SessionPage, SessionView, Trainability, TurnView
from proxy.runs.repository import RunRepository

_EXPLAINED_BY_TURNS = (TrainingState.PENDING, TrainingState.EXCLUDED)


class SessionOverview:
    """Reads sessions of all runs. `token_text` finds the decoder of a run; None if the
    proxy cannot decode."""

    def __init__(self, database: Database, token_text: TokenTextOf | None) -> None:
        self._database = database
        self._token_text = token_text

    async def page(
        self, run_id: str, wanted: SessionFilter, *, cursor: str | None = None, limit: int = 50
    ) -> SessionPage:
        """Return a page of a run's sessions, newest first. Raise InvalidRequest for an invalid cursor.

        A page of a filtered list searches a bounded number of sessions: it may be short, or empty, without being the
        last.
        """
        size = page_size(limit)
        after = Cursor.decode(cursor) if cursor else None

        def read(connection: Connection) -> tuple[Sequence[AnyRow], AnyRow | None, set[str]]:
            repository = SessionOverviewRepository(connection)
            rows = repository.sessions(run_id, wanted, after=after, limit=size + 1)
            is_short = len(rows) <= size and wanted.is_searched
            # Turns cost one query per session, so they are read only where the explanation depends on them.
            unexplained = [row.id for row in rows[:size] if row.training in _EXPLAINED_BY_TURNS]
            searched_to = repository.searched_to(run_id, after) if is_short else None
            return rows, searched_to, teaching_sessions(connection, unexplained)

        rows, searched_to, teaching = await self._database.read(read)
        last: AnyRow | SessionItem | None = searched_to
        items = tuple(session_item(row, teaches=row.id in teaching) for row in rows[:size])
        if len(rows) > size:
            last = items[-1]
        return SessionPage(
            sessions=items,
            next_cursor=Cursor(at=last.created_at, key=last.id).encode() if last is not None else None,
        )

    async def session(self, session_id: str, *, with_tokens: bool = False) -> SessionView:
        """Return a session with its turns, rewards, texts and preferences. Raise NotFound."""
        found = await self._database.read(partial(_session_rows, session_id=session_id))
        skipped = found.audit.skipped if found.audit is not None else None
        item = session_item(found.session, teaches=found.teaches, skipped=skipped)
        text = await decoder_of(self._token_text if with_tokens else None, found.session.run_id)
        turns = tuple(turn_view(turn, with_tokens=with_tokens, text=text) for turn in found.turns)
        return SessionView(
            session=item,
            run=found.run.name if found.run is not None else item.run_id,
            metadata=found.session._mapping["metadata"],
            trainability=Trainability(state=item.training, explanation=item.explanation),
            trained=trained(item, found.trainings),
            turns=turns,
            rewards=tuple(reward_items(found.rewards, used_by(found.trainings))),
            feedback=found.feedback,
            preferences=tuple(preference_view(preference) for preference in found.preferences),
            judgements=tuple(judgement_view(row) for row in found.judgements),
            untrained_turns=untrained(turns, item.purpose, found.audit),
        )

    async def turn(self, turn_id: str, *, with_tokens: bool = False) -> TurnView:
        """Return a turn. Raise NotFound."""
        row = await self._database.read(lambda connection: SessionOverviewRepository(connection).turn(turn_id))
        if row is None:
            raise NotFound(f"there is no turn {turn_id!r}")
        text = await decoder_of(self._token_text if with_tokens else None, row.run_id)
        return turn_view(row, with_tokens=with_tokens, text=text)


class _SessionRows(NamedTuple):
    """The rows of one session's view, read in one transaction."""

    session: AnyRow
    run: AnyRow | None
    turns: Sequence[AnyRow]
    teaches: bool
    audit: SessionAudit | None
    rewards: Sequence[AnyRow]
    trainings: Sequence[AnyRow]
    feedback: tuple[FeedbackEntry, ...]
    preferences: Sequence[AnyRow]
    judgements: Sequence[AnyRow]


def _session_rows(connection: Connection, *, session_id: str) -> _SessionRows:
    repository, ledger = SessionOverviewRepository(connection), LedgerRepository(connection)
    row = repository.session(session_id)
    if row is None:
        raise NotFound(f"there is no session {session_id!r}")
    return _SessionRows(
        session=row,
        run=RunRepository(connection).by_id(row.run_id),
        turns=repository.turns_of(session_id),
        teaches=bool(teaching_sessions(connection, [session_id])),
        audit=session_audit(connection, row.run_id, row.consumed_by, session_id),
        rewards=ledger.entries([session_id]),
        trainings=ledger.trainings_of([session_id]),
        feedback=texts_of(connection, [session_id]).get(session_id, ()),
        preferences=ledger.preferences_of(session_id),
        judgements=repository.judgements_of(session_id),
    )
