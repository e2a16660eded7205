"""Preferences as they travel: both sides with the tokens that were recorded of them, one preference a line."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec
from sqlalchemy import Connection, Row, insert, or_, select

from proxy.contract.export import PREFERENCE_FORMAT, ExportedPreference, ExportedSide, ExportedSideTurn
from proxy.contract.identifiers import RunId, new_preference_id
from proxy.contract.reward import RewardRules
from proxy.contract.turn import SamplingParameters
from proxy.database.packed_json import json_text
from proxy.database.tables import PreferenceRow, RunRow, SessionRow, TurnRow
from proxy.transfer.conversation import messages_of
from proxy.transfer.reading import TransferReader
from proxy.transfer.records import InvalidRecord, SessionRecord, TurnRecord

AnyRow = Row[*tuple[Any, ...]]


class SideTurn(ExportedSideTurn, frozen=True, kw_only=True):
    sampling: SamplingParameters


class PreferenceSide(ExportedSide, frozen=True, kw_only=True):
    """Where `turn_id` says so, it is about that turn of the session; `place` is the turn's in the session's own
    record. `messages` are the conversation, for readers."""

    origin: str | None
    turn_id: str | None
    place: int | None
    messages: list[dict[str, Any]]
    turns: tuple[SideTurn, ...]


class PreferenceRecord(ExportedPreference, frozen=True, kw_only=True):
    """`origin` is the id that it had where it was first recorded, if it was imported since."""

    origin: str | None
    run: str
    comment: str | None
    chosen: PreferenceSide
    rejected: PreferenceSide


class PreferenceFilter(msgspec.Struct, frozen=True, kw_only=True):
    """None means any. `since` and `until` bound the time of the statement, in seconds since the epoch, the second one
    exclusively."""

    since: float | None = None
    until: float | None = None
    source: str | None = None


def encode_preference(record: PreferenceRecord) -> bytes:
    """One line of JSON, with its end."""
    return json_text(msgspec.to_builtins(record)).encode() + b"\n"


def decode_preference(line: bytes) -> PreferenceRecord:
    """Raises InvalidRecord."""
    try:
        record = msgspec.convert(json.loads(line), PreferenceRecord)
    except (msgspec.ValidationError, ValueError, RecursionError) as error:
        raise InvalidRecord(str(error)) from error
    if record.format != PREFERENCE_FORMAT:
        raise InvalidRecord(f"format is {PREFERENCE_FORMAT!r}, not {record.format!r} - at `$.format`")
    return record


def preference_page(
    connection: Connection, run_id: str, wanted: PreferenceFilter, after: int, *, rules: RewardRules, limit: int
) -> tuple[list[PreferenceRecord], int | None]:
    """The next preferences behind `after`, in order of arrival, and where the page ends: None where nothing follows.
    Those about an erased session are left out."""
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
    """None where it is not there any more."""
    if session is None:
        return None
    places = list(range(len(session.turns)))
    place = None
    if turn_id is not None:
        place = next((index for index in places if session.turns[index].id == turn_id), None)
        if place is None:
            return None
        places = _line(session.turns, place)
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


def _line(turns: Sequence[TurnRecord], place: int) -> list[int]:
    """The turn and those that it goes on from, the first one first."""
    line, step = [], int(place)
    while True:
        line.append(step)
        parent = turns[step].parent
        if parent is None:
            return line[::-1]
        step = parent


def _moved(parent: int | None, moved: dict[int, int]) -> int | None:
    return None if parent is None else moved[parent]


_IMPORTED = "import:"


def _origin(key: str | None) -> str | None:
    return key.removeprefix(_IMPORTED) if key is not None and key.startswith(_IMPORTED) else None


def add_preference(connection: Connection, run_id: RunId, record: PreferenceRecord) -> bool:
    """Records it of the sessions that the run has, under their own ids or as imported ones. False where it came
    before, or is of this very run. Raises InvalidRecord where a side is not there: import its sessions first."""
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
    if found is None:  # its turns got new ids when it was imported, and the order of its record
        found = connection.execute(
            select(TurnRow.id).where(of_session, TurnRow.ordinal == side.place)
        ).scalar_one_or_none()
    if found is None:
        raise InvalidRecord(f"session {session_id} has no turn {side.place} - at `$.{name}.turn_id`")
    return session_id, found
