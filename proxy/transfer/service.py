"""Export of a run's sessions and preferences as streams of records, and their import."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import msgspec
from sqlalchemy import Connection

from proxy.clock import Clock
from proxy.contract.reward import RewardRules
from proxy.database.unit_of_work import Database
from proxy.errors import InvalidRequest
from proxy.lifecycle.events import append_event
from proxy.lifecycle.signals import Signals
from proxy.runs.service import RunView
from proxy.transfer.preferences import (
    PreferenceFilter,
    PreferenceRecord,
    add_preference,
    decode_preference,
    preference_page,
)
from proxy.transfer.reading import ExportFilter, Place, TransferReader
from proxy.transfer.records import InvalidRecord, SessionRecord, decode
from proxy.transfer.writing import TransferWriter, is_whole

_Record = TypeVar("_Record")

PseudonymsOf = Callable[[Mapping[str, Any]], Sequence[bytes]]

# Sessions per read transaction: each may have many megabytes, and all of them are in memory.
_READ_AT_ONCE = 16
# Sessions per transaction, which other writes wait for.
_WRITTEN_AT_ONCE = 16


class ImportReport(msgspec.Struct, frozen=True, kw_only=True):
    """The result of importing sessions. `skipped` already existed; of the imported ones, `trainable` can be trained,
    now or once rewarded."""

    imported: int
    skipped: int
    trainable: int


class PreferenceReport(msgspec.Struct, frozen=True, kw_only=True):
    """The result of importing preferences. `skipped` already existed."""

    imported: int
    skipped: int


class TransferService:
    def __init__(self, *, database: Database, clock: Clock, signals: Signals, pseudonyms_of: PseudonymsOf) -> None:
        """`pseudonyms_of` returns the pseudonyms of the users that a request body names."""
        self._database = database
        self._pseudonyms_of = pseudonyms_of
        self._clock = clock
        self._signals = signals

    async def export(self, run: RunView, wanted: ExportFilter) -> AsyncIterator[SessionRecord]:
        """Yield the run's sessions (`sessions_of`)."""
        async for record in sessions_of(self._database, run, wanted):
            yield record

    async def export_preferences(self, run: RunView, wanted: PreferenceFilter) -> AsyncIterator[PreferenceRecord]:
        """Yield the run's preferences in order of arrival, each with both sides as they are when it is read; those
        about an erased session are omitted. A few are in memory at a time."""
        after: int | None = 0
        rules = run.settings.reward_rules
        while after is not None:
            read = partial(
                preference_page, run_id=run.id, wanted=wanted, after=after, rules=rules, limit=_READ_AT_ONCE
            )
            records, after = await self._database.read(read)
            for record in records:
                yield record

    async def add_preferences(self, run: RunView, body: bytes, *, first_line: int) -> PreferenceReport:
        """Import preferences, one a line, about sessions of the run; known ones are skipped.

        Import none and raise InvalidRequest, which names the line, if one is invalid or its session is missing.
        """
        records = await asyncio.to_thread(_records, decode_preference, body, first_line)

        def write(connection: Connection) -> int:
            added = 0
            for number, record in records:
                try:
                    added += add_preference(connection, run.id, record)
                except InvalidRecord as error:
                    raise InvalidRequest(f"line {number}: {error}", param=f"line {number}") from error
            return added

        imported = await self._database.commit(write) if records else 0
        return PreferenceReport(imported=imported, skipped=len(records) - imported)

    async def add(self, run: RunView, body: bytes, *, first_line: int, train: bool, keep_ids: bool) -> ImportReport:
        """Import session records, one a line; known ones are skipped.

        Import none and raise InvalidRequest, which names line and field, if one is invalid. `first_line` is the
        number of the first line in that message. With `train`, whole records are trained; with `keep_ids`, sessions,
        turns and rewards keep their ids.
        """
        records = [record for _, record in await asyncio.to_thread(_records, decode, body, first_line)]
        imported = trainable = 0
        for start in range(0, len(records), _WRITTEN_AT_ONCE):
            part = records[start : start + _WRITTEN_AT_ONCE]
            # Outside the transaction, which other writes wait for.
            users = [self._users(record) for record in part]
            write = partial(_add, run, part, users, train, keep_ids, self._clock())
            added, usable = await self._database.commit(write)
            imported, trainable = imported + added, trainable + usable
        if imported:
            self._signals.trajectories.notify()
            self._signals.events.notify()
        return ImportReport(imported=imported, skipped=len(records) - imported, trainable=trainable)

    def _users(self, record: SessionRecord) -> list[bytes]:
        bodies = [{"metadata": record.metadata}, *(turn.request for turn in record.turns)]
        return list(dict.fromkeys(digest for body in bodies for digest in self._pseudonyms_of(body)))


async def sessions_of(database: Database, run: RunView, wanted: ExportFilter) -> AsyncIterator[SessionRecord]:
    """Yield the run's sessions, oldest first, each as it is when it is read; sessions erased meanwhile are omitted. A
    few sessions are in memory at a time."""
    place: Place | None = None
    rules = run.settings.reward_rules
    while True:
        records, place = await database.read(partial(_page, run.id, wanted, place, rules))
        for record in records:
            yield record
        if place is None:
            return


def _page(
    run_id: str, wanted: ExportFilter, place: Place | None, rules: RewardRules, connection: Connection
) -> tuple[list[SessionRecord], Place | None]:
    return TransferReader(connection).page(run_id, wanted, place, rules=rules, limit=_READ_AT_ONCE)


def _add(
    run: RunView,
    records: Sequence[SessionRecord],
    users: Sequence[Sequence[bytes]],
    train: bool,
    keep_ids: bool,
    now: float,
    connection: Connection,
) -> tuple[int, int]:
    writer = TransferWriter(connection, run.id, run.head_version)
    added = [
        record
        for record, digests in zip(records, users, strict=True)
        if writer.add(record, digests, train=train, keep_ids=keep_ids, now=now)
    ]
    usable = sum(train and is_whole(record, run.head_version) for record in added)
    if added:
        data = {"sessions": len(added), "for_training": usable}
        append_event(connection, run_id=run.id, kind="sessions.imported", data=data, now=now)
    return len(added), usable


def _records(decode_: Callable[[bytes], _Record], body: bytes, first_line: int) -> list[tuple[int, _Record]]:
    """Parse every line that is not empty; return records with line numbers. Raise InvalidRequest, which names the
    line. Call it on a thread: a body may have many megabytes."""
    # Iterated rather than split: the list of the lines of a body of line ends alone would be huge.
    lines = enumerate(io.BytesIO(body), first_line)
    return [(number, _of_line(decode_, line, number)) for number, line in lines if line.strip()]


def _of_line(decode_: Callable[[bytes], _Record], line: bytes, number: int) -> _Record:
    try:
        return decode_(line)
    except InvalidRecord as error:
        raise InvalidRequest(f"line {number}: {error}", param=f"line {number}") from error
