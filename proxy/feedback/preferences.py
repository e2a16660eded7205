"""Recording of preferences: one session or turn is better than another."""

from __future__ import annotations

import msgspec
from sqlalchemy import Connection

from proxy.auth.access import Principal
from proxy.contract.identifiers import PreferenceId, SessionId, TurnId, new_preference_id
from proxy.contract.reward import DEFAULT_SOURCE
from proxy.database.rows import AnyRow
from proxy.errors import InvalidRequest
from proxy.feedback.repository import FeedbackRepository
from proxy.feedback.targets import Finder, Target


class PreferenceItem(msgspec.Struct, frozen=True, kw_only=True):
    """A preference to record. `chosen` and `rejected` name a session (by its id or the client's own name) or a
    turn."""

    chosen: str
    rejected: str
    run: str | None = None
    source: str = DEFAULT_SOURCE
    comment: str | None = None
    idempotency_key: str | None = None


class Side(msgspec.Struct, frozen=True, kw_only=True):
    """One side of a preference. Without a `turn_id` it is the whole session."""

    session_id: SessionId
    turn_id: TurnId | None


class PreferenceReceipt(msgspec.Struct, frozen=True, kw_only=True):
    """A recorded preference; every repetition of an idempotency key gets the same receipt."""

    id: PreferenceId
    chosen: Side
    rejected: Side


def prefer(
    connection: Connection, principal: Principal, item: PreferenceItem, *, now: float
) -> tuple[PreferenceReceipt, bool]:
    """Record a preference; return its receipt and whether it is new. Raise NotFound, Gone, PermissionDenied or
    InvalidRequest."""
    finder = Finder(connection, principal, item.run)
    chosen, rejected = finder.of_either(item.chosen, "chosen"), finder.of_either(item.rejected, "rejected")
    _check(chosen, rejected)
    repository = FeedbackRepository(connection)
    if item.idempotency_key is not None:
        known = repository.preference(run_id=chosen.run_id, idempotency_key=item.idempotency_key)
        if known is not None:
            return _repeated(known, chosen, rejected), False
    receipt = PreferenceReceipt(id=new_preference_id(), chosen=_side(chosen), rejected=_side(rejected))
    repository.insert_preference(
        {
            "id": receipt.id,
            "run_id": chosen.run_id,
            "chosen_session_id": chosen.session_id,
            "chosen_turn_id": chosen.turn_id,
            "rejected_session_id": rejected.session_id,
            "rejected_turn_id": rejected.turn_id,
            "source": item.source,
            "comment": item.comment,
            "idempotency_key": item.idempotency_key,
            "created_at": now,
        }
    )
    return receipt, True


def _check(chosen: Target, rejected: Target) -> None:
    if chosen.run_id != rejected.run_id:
        raise InvalidRequest("chosen and rejected belong to different runs", param="rejected")
    if chosen.session_id != rejected.session_id:
        return
    if chosen.turn_id == rejected.turn_id:
        raise InvalidRequest("chosen and rejected are the same", param="rejected")
    if None in (chosen.turn_id, rejected.turn_id):
        raise InvalidRequest("one is a turn of the other: give two sessions or two turns", param="rejected")


def _repeated(row: AnyRow, chosen: Target, rejected: Target) -> PreferenceReceipt:
    known = PreferenceReceipt(
        id=row.id,
        chosen=Side(session_id=row.chosen_session_id, turn_id=row.chosen_turn_id),
        rejected=Side(session_id=row.rejected_session_id, turn_id=row.rejected_turn_id),
    )
    if (known.chosen, known.rejected) != (_side(chosen), _side(rejected)):
        raise InvalidRequest("this idempotency_key was already used for another preference", param="idempotency_key")
    return known


def _side(target: Target) -> Side:
    return Side(session_id=target.session_id, turn_id=target.turn_id)
