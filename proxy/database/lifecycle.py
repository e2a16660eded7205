"""The life of a session, for everybody who moves it: how it ends, what its reward is, and when it is trainable.

Sessions, feedback and trajectories change different facts (the end, the rewards, the turns); each calls `settle`
in the same transaction, which derives the rest from the facts. In a `Database.write` block, these functions run by
`connection.run_sync`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Any

import msgspec
from sqlalchemy import Connection, Row, bindparam, select, update

from proxy.contract.trajectory import Purpose
from proxy.database.tables import RewardRow, SessionRow

_CHUNK = 500


class SessionState(StrEnum):
    OPEN = "open"
    ENDED = "ended"


class TrainingState(StrEnum):
    """Where a session stands with the trainer; described at `tables.SessionRow`."""

    PENDING = "pending"
    READY = "ready"
    LEASED = "leased"
    CONSUMED = "consumed"
    STALE = "stale"
    EXPIRED = "expired"
    EXCLUDED = "excluded"


class Outcome(StrEnum):
    """How the attempt went. `failed` and `cancelled` are not trained unless rewarded."""

    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"


class EndReason(StrEnum):
    REWARD = "reward"
    EXPLICIT = "explicit"
    IDLE = "idle"


OUT_OF_OUR_HANDS = frozenset({TrainingState.LEASED, TrainingState.CONSUMED, TrainingState.STALE})
"""States that claims and commits decide; `settle` never leaves them."""


class LedgerEntry(msgspec.Struct, frozen=True, kw_only=True):
    """What `combine` needs of an entry. `turn_id` None means the whole session."""

    turn_id: str | None
    name: str
    source: str
    value: float


class SessionFacts(msgspec.Struct, frozen=True, kw_only=True):
    """From which a session's training state follows."""

    purpose: Purpose
    state: SessionState
    training: TrainingState
    outcome: Outcome | None
    turn_count: int
    rewarded: bool


def combine(entries: Iterable[LedgerEntry], weights: Mapping[str, float]) -> float | None:
    """One reward out of entries about the same thing, given in order of arrival.

    Sum over (name, source) of weight(name) × latest value; names without a weight weigh 1. None without entries:
    absent is not zero.
    """
    latest = {(entry.name, entry.source): entry.value for entry in entries}
    if not latest:
        return None
    return sum(weights.get(name, 1.0) * value for (name, _source), value in sorted(latest.items()))


def training_state(facts: SessionFacts) -> TrainingState:
    """Where a session stands, as far as its own facts decide."""
    if facts.training in OUT_OF_OUR_HANDS:
        return facts.training
    if facts.purpose is Purpose.EVAL:
        return TrainingState.EXCLUDED
    if facts.state is SessionState.OPEN:
        return TrainingState.PENDING
    given_up = facts.outcome in (Outcome.FAILED, Outcome.CANCELLED) and not facts.rewarded
    if facts.turn_count == 0 or given_up:
        return TrainingState.EXCLUDED
    if facts.rewarded:
        return TrainingState.READY
    return TrainingState.EXPIRED if facts.training is TrainingState.EXPIRED else TrainingState.PENDING


def end_session(
    connection: Connection, session_id: str, *, reason: EndReason, outcome: Outcome | None, now: float
) -> bool:
    """Ends a session; whether it was open. A later outcome fills one that was missing, nothing else changes.

    Call `settle` afterwards.
    """
    return end_sessions(connection, [session_id], reason=reason, outcome=outcome, now=now) > 0


def end_sessions(
    connection: Connection,
    session_ids: Sequence[str],
    *,
    reason: EndReason,
    outcome: Outcome | None,
    now: float,
) -> int:
    """`end_session` for many; how many were open."""
    ended = 0
    for chunk in _chunks(session_ids):
        if outcome is not None:
            connection.execute(
                update(SessionRow)
                .where(SessionRow.id.in_(chunk), SessionRow.outcome.is_(None))
                .values(outcome=outcome.value)
            )
        result = connection.execute(
            update(SessionRow)
            .where(SessionRow.id.in_(chunk), SessionRow.state == SessionState.OPEN.value)
            .values(state=SessionState.ENDED.value, end_reason=reason.value, ended_at=now)
        )
        ended += result.rowcount
    return ended


def settle(
    connection: Connection, session_ids: Sequence[str], *, reward_weights: Mapping[str, float], now: float
) -> list[str]:
    """Recomputes `reward`, `training` and `ready_at`; the ids whose training state changed.

    After the commit, whoever gets a non-empty list calls `signals.trajectories.notify()`: sessions may have become
    claimable, or groups complete.
    """
    changed: list[str] = []
    for chunk in _chunks(session_ids):
        sessions = (connection.execute(_FACTS, {"ids": chunk})).all()
        ledger = _ledger(connection, chunk)
        updates: list[dict[str, Any]] = []
        for row in sessions:
            entries = ledger.get(row.id, [])
            reward = combine((entry for entry in entries if entry.turn_id is None), reward_weights)
            training = training_state(_facts(row, rewarded=bool(entries)))
            if training.value != row.training:
                changed.append(row.id)
            elif reward == row.reward:
                continue
            is_new = training is TrainingState.READY and row.training != TrainingState.READY.value
            ready_at = now if is_new else row.ready_at
            updates.append({"of": row.id, "reward": reward, "training": training.value, "ready_at": ready_at})
        if updates:
            connection.execute(_SETTLE, updates)
    return changed


_FACTS = select(
    SessionRow.id,
    SessionRow.purpose,
    SessionRow.state,
    SessionRow.training,
    SessionRow.outcome,
    SessionRow.turn_count,
    SessionRow.reward,
    SessionRow.ready_at,
).where(SessionRow.id.in_(bindparam("ids", expanding=True)))

_LEDGER = (
    select(RewardRow.session_id, RewardRow.turn_id, RewardRow.name, RewardRow.source, RewardRow.value)
    .where(RewardRow.session_id.in_(bindparam("ids", expanding=True)))
    .order_by(RewardRow.sequence)
)

_SETTLE = (
    update(SessionRow)
    .where(SessionRow.id == bindparam("of"))
    .values(reward=bindparam("reward"), training=bindparam("training"), ready_at=bindparam("ready_at"))
)


def _ledger(connection: Connection, session_ids: Sequence[str]) -> dict[str, list[LedgerEntry]]:
    entries: dict[str, list[LedgerEntry]] = {}
    for row in connection.execute(_LEDGER, {"ids": session_ids}):
        entry = LedgerEntry(turn_id=row.turn_id, name=row.name, source=row.source, value=row.value)
        entries.setdefault(row.session_id, []).append(entry)
    return entries


def _facts(row: Row[*tuple[Any, ...]], *, rewarded: bool) -> SessionFacts:
    return SessionFacts(
        purpose=Purpose(row.purpose),
        state=SessionState(row.state),
        training=TrainingState(row.training),
        outcome=Outcome(row.outcome) if row.outcome is not None else None,
        turn_count=row.turn_count,
        rewarded=rewarded,
    )


def _chunks(session_ids: Sequence[str]) -> Iterable[list[str]]:
    """Databases bound the number of parameters of a statement."""
    return (list(session_ids[start : start + _CHUNK]) for start in range(0, len(session_ids), _CHUNK))
