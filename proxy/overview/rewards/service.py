"""Lists of ledger entries, and of sessions whose rewards were revised after training."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence

import msgspec
from sqlalchemy import Connection

from proxy.contract.reward import RewardRules
from proxy.database.rows import AnyRow
from proxy.database.unit_of_work import Database
from proxy.errors import InvalidRequest, NotFound
from proxy.lifecycle.combining import LedgerEntry, session_rewards
from proxy.overview.filters import Cursor, page_size
from proxy.overview.rewards.assembly import reward_items, used_by
from proxy.overview.rewards.repository import LedgerRepository
from proxy.overview.rewards.views import RevisedPage, RevisedSession, RevisedTurn, RewardFilter, RewardPage


class LedgerOverview:
    """Reads the ledger. Methods raise NotFound for an unknown session or turn, InvalidRequest for an invalid
    cursor."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def page(
        self, run_id: str | None, wanted: RewardFilter, *, cursor: str | None = None, limit: int = 50
    ) -> RewardPage:
        """Return a page of entries of a run, or of all runs, newest first. With a run, `wanted.session` may be the
        client's own name."""
        size = page_size(limit)
        after = Cursor.decode(cursor) if cursor else None
        if after is not None and not after.key.isdecimal():
            raise InvalidRequest("invalid cursor: take `next_cursor` of the previous page", param="cursor")

        def read(
            connection: Connection,
        ) -> tuple[list[AnyRow], Sequence[AnyRow], Sequence[AnyRow], dict[str, str]]:
            repository = LedgerRepository(connection)
            resolved = _resolved(repository, run_id, wanted)
            run_ids = [run_id] if run_id is not None else repository.run_ids()
            pages = [repository.page(run, resolved, after=after, limit=size + 1) for run in run_ids]
            rows = _newest(pages, size + 1)
            touched = sorted({row.session_id for row in rows[:size]})
            trainings = repository.trainings_of(touched)
            return rows, repository.entries(touched), trainings, repository.names_of(touched)

        rows, ledger, trainings, names = await self._database.read(read)
        items = {
            item.id: msgspec.structs.replace(item, external_id=names.get(item.session_id))
            for item in reward_items(ledger, used_by(trainings))
        }
        last = rows[size - 1] if len(rows) > size else None
        return RewardPage(
            rewards=tuple(items[row.id] for row in rows[:size]),
            next_cursor=Cursor(at=last.created_at, key=str(last.sequence)).encode() if last is not None else None,
        )

    async def revised(self, run_id: str, *, cursor: str | None = None, limit: int = 50) -> RevisedPage:
        """Return a page of trained sessions whose rewards, their own or a turn's, changed, the last revised first."""
        size = page_size(limit)
        after = Cursor.decode(cursor) if cursor else None

        def read(
            connection: Connection,
        ) -> tuple[Sequence[AnyRow], dict[str, list[LedgerEntry]], Sequence[AnyRow], Sequence[AnyRow]]:
            repository = LedgerRepository(connection)
            rows = repository.revised(run_id, after=after, limit=size + 1)
            touched = [row.id for row in rows[:size]]
            trainings = repository.trainings_of(touched)
            return rows, repository.ledgers(touched), repository.entries(touched), trainings

        rows, ledgers, entries, trainings = await self._database.read(read)
        used = used_by(trainings)
        last = rows[size - 1] if len(rows) > size else None
        return RevisedPage(
            sessions=tuple(_revised(row, ledgers[row.id], entries, used) for row in rows[:size]),
            next_cursor=Cursor(at=last.revised_at, key=last.id).encode() if last is not None else None,
        )


def _resolved(repository: LedgerRepository, run_id: str | None, wanted: RewardFilter) -> RewardFilter:
    """Return the filter with the session's id instead of its name, or with the session of the given turn."""
    session = wanted.session
    if session is not None and run_id is not None:
        session = repository.session_id(run_id, session)
        if session is None:
            raise NotFound(f"there is no session {wanted.session!r}", param="session")
    if wanted.turn is not None:
        of_turn = repository.session_of_turn(wanted.turn)
        if of_turn is None or session not in (None, of_turn):
            raise NotFound(f"there is no turn {wanted.turn!r}" + (" in it" if session else ""), param="turn")
        session = of_turn
    return msgspec.structs.replace(wanted, session=session)


def _newest(pages: Sequence[Sequence[AnyRow]], count: int) -> list[AnyRow]:
    """Merge pages that are sorted newest first; return the first `count` rows."""
    merged = heapq.merge(*pages, key=lambda row: (row.created_at, row.sequence), reverse=True)
    return [row for _, row in zip(range(count), merged, strict=False)]


def _revised(
    row: AnyRow, ledger: Sequence[LedgerEntry], entries: Iterable[AnyRow], used: Mapping[str, int]
) -> RevisedSession:
    rules = RewardRules() if row.reward_rules is None else msgspec.convert(row.reward_rules, RewardRules)
    trained = set(row.reward_ids)
    then = session_rewards((entry for entry in ledger if entry.id in trained), rules).turn_rewards
    now = session_rewards(ledger, rules).turn_rewards
    items = reward_items((entry for entry in entries if entry.session_id == row.id), used)
    return RevisedSession(
        session_id=row.id,
        external_id=row.external_id,
        task=row.task,
        version=row.consumed_by,
        claim_id=row.claim_id,
        trained_at=row.trained_at,
        revised_at=row.revised_at,
        reward_then=row.reward_then,
        reward_now=row.reward_now,
        turns=tuple(
            RevisedTurn(turn_id=turn, reward_then=then.get(turn), reward_now=now.get(turn))
            for turn in dict.fromkeys([*then, *now])
            if then.get(turn) != now.get(turn)
        ),
        entries=tuple(item for item in items if not item.superseded and item.id not in trained),
    )
