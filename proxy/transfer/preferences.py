"""The exported form of preferences, each side with its recorded tokens, and the queries that read and write them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec
from sqlalchemy import Connection, insert, or_, select

from proxy.contract.export import PREFERENCE_FORMAT, ExportedPreference, ExportedSide, ExportedSideTurn
from proxy.contract.identifiers import RunId, new_preference_id
from proxy.contract.reward import RewardRules
from proxy.contract.turn import SamplingParameters
from proxy.database.packed_json import json_text
from proxy.database.rows import AnyRow
from proxy.database.tables import PreferenceRow, RunRow, SessionRow, TurnRow
from proxy.transfer.conversation import messages_of
from proxy.transfer.reading import TransferReader
from proxy.transfer.records import InvalidRecord, SessionRecord, TurnRecord


class SideTurn(ExportedSideTurn, frozen=True, kw_only=True):
    sampling: SamplingParameters


class PreferenceSide(ExportedSide, frozen=True, kw_only=True):
    """One side of a preference: a whole session, or one turn of it if `turn_id` is set.

    `place` is the turn's index in the session's own record. `messages` is the conversation, for human readers.
    """

    origin: str | None
    turn_id: str | None
    place: int | None
    messages: list[dict[str, Any]]
    turns: tuple[SideTurn, ...]


class PreferenceRecord(ExportedPreference, frozen=True, kw_only=True):
    """A preference between two sides. `origin` is the id of the preference in the store that first recorded it; None
    if that is this store."""

    origin: str | None
    run: str
    comment: str | None
    chosen: PreferenceSide
    rejected: PreferenceSide


class PreferenceFilter(msgspec.Struct, frozen=True, kw_only=True):
    """A selection of preferences; None means any. `since` and `until` (exclusive) bound the time at which they were
    posted, in seconds since the epoch."""

    since: float | None = None
    until: float | None = None
    source: str | None = None


def encode_preference(record: PreferenceRecord) -> bytes:
    """Return the record as one line of JSON, line end included."""
    return json_text(msgspec.to_builtins(record)).encode() + b"\n"


def decode_preference(line: bytes) -> PreferenceRecord:
    """Parse one line of JSON. Raise InvalidRecord if it is not a preference."""
    try:
        record = msgspec.convert(json.loads(line), PreferenceRecord)
    except (msgspec.ValidationError, ValueError, RecursionError) as error:
        raise InvalidRecord(str(error)) from error
    if record.format != PREFERENCE_FORMAT:
        raise InvalidRecord(f"expected format {PREFERENCE_FORMAT!r}, got {record.format!r} - at `$.format`")
    return record


def preference_page(
    connection: Connection, run_id: str, wanted: PreferenceFilter, after: int, *, rules: RewardRules, limit: int
) -> tuple[list[PreferenceRecord], int | None]:
    """Return the next preferences after the sequence number `after`, in order of arrival, and the sequence number at
    which the page ends; None if it is the last page. Preferences about an erased session are omitted."""
    statement = select(PreferenceRow.__table__).where(PreferenceRow.run_id == run_id, PreferenceRow.sequence > after)
    if wanted.since is not None:
        statement = statement.where(PreferenceRow.created_at >= wanted.since)
    if wanted.until is not None:
        statement = statement.where(PreferenceRow.created_at < wanted.until)
    if wanted.source is not None:
        statement = statement.where(PreferenceRow.source == wanted.source)
    rows = connection.execute(statement.order_by(PreferenceRow.sequence).limit(limit)).all()
    run_name = connection.execute(select(RunRow.name).where(RunRow.id == run_id)).scalar_one()
    ids = {session_id for row in rows for session_id in (row.chosen_session_id, row.rejected_session_id)}
    sessions = TransferReader(connection).named(sorted(ids), rules=rules)
    records = []
    for row in rows:
        chosen = _side(sessions.get(row.chosen_session_id), row.chosen_turn_id)
        rejected = _side(sessions.get(row.rejected_session_id), row.rejected_turn_id)
        if chosen is not None and rejected is not None:
            records.append(_record(row, run_name, chosen, rejected))
    return records, rows[-1].sequence if len(rows) == limit else None


def _record(row: AnyRow, run_name: str, chosen: PreferenceSide, rejected: PreferenceSide) -> PreferenceRecord:
    return PreferenceRecord(
        format=PREFERENCE_FORMAT,
        id=row.id,
        origin=_origin(row.idempotency_key),
        run=run_name,
        source=row.source,
        comment=row.comment,
        created_at=row.created_at,
        chosen=chosen,
        rejected=rejected,
    )


def _side(session: SessionRecord | None, turn_id: str | None) -> PreferenceSide | None:
    """Return one side with its turns; None if its session or turn no longer exists."""
    if session is None:
        return None
    places = list(range(len(session.turns)))
    place = None
    if turn_id is not None:
        place = next((index for index in places if session.turns[index].id == turn_id), None)
        if place is None:
            return None
        places = _path(session.turns, place)
    # Parents are indices into the record; a side that has only some of the turns needs them renumbered.
    moved = {old: new for new, old in enumerate(places)}
    turns = [session.turns[index] for index in places]
    return PreferenceSide(
        session_id=session.session_id,
        origin=session.origin,
        turn_id=turn_id,
        place=place,
        purpose=session.purpose,
        reward=session.reward,
        messages=messages_of([msgspec.structs.replace(turn, parent=_moved(turn.parent, moved)) for turn in turns]),
        turns=tuple(
            SideTurn(
                id=turn.id,
                parent=_moved(turn.parent, moved),
                prefix_tokens=turn.prefix_tokens,
                prompt_ids=turn.prompt_ids,
                output_ids=turn.output_ids,
                logprobs=turn.logprobs,
                versions=turn.versions,
                masked=turn.masked,
                sampling=turn.sampling,
                state=turn.state,
                preferred=place is None or index == place,
            )
            for index, turn in zip(places, turns, strict=True)
        ),
    )


def _path(turns: Sequence[TurnRecord], place: int) -> list[int]:
    """Return the indices of the turn's ancestors and the turn itself, the root first."""
    path: list[int] = []
    step: int | None = place
    while step is not None:
        path.append(step)
        step = turns[step].parent
    return path[::-1]


def _moved(parent: int | None, moved: dict[int, int]) -> int | None:
    return None if parent is None else moved[parent]


# Imported preferences store their origin as idempotency key, so that a repeated import is found by a unique index.
_IMPORTED = "import:"


def _origin(key: str | None) -> str | None:
    return key.removeprefix(_IMPORTED) if key is not None and key.startswith(_IMPORTED) else None


def add_preference(connection: Connection, run_id: RunId, record: PreferenceRecord) -> bool:
    """Insert a preference about sessions of the run, found by their own id or by the id they were imported from.

    Return False if the run already has the preference. Raise InvalidRecord if a side's session or turn is missing.
    """
    origin = record.origin or record.id
    key = f"{_IMPORTED}{origin}"
    known = select(PreferenceRow.id).where(
        PreferenceRow.run_id == run_id, or_(PreferenceRow.id == origin, PreferenceRow.idempotency_key == key)
    )
    if connection.execute(known.limit(1)).first() is not None:
        return False
    chosen = _found(connection, run_id, record.chosen, "chosen")
    rejected = _found(connection, run_id, record.rejected, "rejected")
    values = {
        "id": new_preference_id(),
        "run_id": run_id,
        "chosen_session_id": chosen[0],
        "chosen_turn_id": chosen[1],
        "rejected_session_id": rejected[0],
        "rejected_turn_id": rejected[1],
        "source": record.source,
        "comment": record.comment,
        "idempotency_key": key,
        "created_at": record.created_at,
    }
    connection.execute(insert(PreferenceRow).values(**values))
    return True


def _found(connection: Connection, run_id: str, side: PreferenceSide, name: str) -> tuple[str, str | None]:
    known = [side.session_id, *([side.origin] if side.origin is not None else [])]
    session_id = connection.execute(
        select(SessionRow.id)
        .where(
            SessionRow.run_id == run_id,
            SessionRow.erased_at.is_(None),
            or_(SessionRow.id.in_(known), SessionRow.origin.in_(known)),
        )
        .limit(1)
    ).scalar_one_or_none()
    if session_id is None:
        raise InvalidRecord(f"the run has no session {side.session_id}: import its sessions first - at `$.{name}`")
    if side.turn_id is None:
        return session_id, None
    of_session = TurnRow.session_id == session_id
    its = TurnRow.id == side.turn_id
    found: str | None = connection.execute(select(TurnRow.id).where(of_session, its)).scalar_one_or_none()
    if found is None:
        # An import gives turns new ids and keeps their order.
        found = connection.execute(
            select(TurnRow.id).where(of_session, TurnRow.ordinal == side.place)
        ).scalar_one_or_none()
    if found is None:
        raise InvalidRecord(f"session {session_id} has no turn {side.place} - at `$.{name}.turn_id`")
    return session_id, found
