"""The life of a session: how it ends, its reward, and whether it can be trained.

Sessions, feedback and turns change different facts (the end, the rewards, the turns). Each of them calls `settle` in
the same transaction, which derives the training state and the reward from the facts.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec
from sqlalchemy import (
    ColumnElement,
    Connection,
    Double,
    Float,
    Text,
    Update,
    bindparam,
    cast,
    literal_column,
    select,
    update,
)

from proxy.contract.reward import RewardRules
from proxy.contract.states import EndReason, Outcome, SessionState, TrainingState
from proxy.contract.trajectory import Purpose
from proxy.database.prepared import Prepared, among, given_rows
from proxy.database.tables import ClaimedSessionRow, ClaimRow, RewardRow, RunRow, SessionRow
from proxy.lifecycle.combining import LedgerEntry, revised_at, session_rewards
from proxy.lifecycle.judging import GIVEN_UP, enqueue_judging
from proxy.lifecycle.outcomes import Ending, SessionEnd, SessionFacts, ended, training_state
from proxy.lifecycle.texts import sessions_with_texts
from proxy.lifecycle.trainable import teaching_sessions
from proxy.settings import RunSettings

_NONE: Mapping[str, Ending] = MappingProxyType({})


def is_open() -> ColumnElement[bool]:
    """Return the condition that a session is open."""
    # A literal, as in the partial index of open sessions: with a parameter the planner could not use that index.
    return SessionRow.state == literal_column("'open'")


def lock_sessions(connection: Connection, session_ids: Sequence[str]) -> None:
    """Lock these sessions against other transactions' changes until this one ends."""
    # In the order of their ids: two transactions that lock some of the same sessions then cannot deadlock. On SQLite
    # the write transaction has already locked the whole store.
    if connection.dialect.name != "sqlite":
        _LOCK.run(connection, {"ids": session_ids})


class Settled(NamedTuple):
    """The ids of sessions whose training state changed, and of those that ended."""

    changed: list[str]
    ended: list[str]


def settle(
    connection: Connection, session_ids: Iterable[str], *, now: float, endings: Mapping[str, Ending] = _NONE
) -> Settled:
    """End the sessions in `endings`, and recompute `reward`, `training`, `ready_at` and `revised_at` of these and of
    the sessions in `session_ids`.

    Rewards are combined by the run's present rules; those of a leased or consumed session by the rules of its claim.
    The run's judges get a job for each session that ends.

    If `changed` is not empty, the caller calls `signals.trajectories.notify()` after the commit: sessions may have
    become claimable, or groups complete.
    """
    done = Settled([], [])
    wanted = list({**dict.fromkeys(session_ids), **endings})
    if not wanted:
        return done
    found = [(_Facts(*columns), config) for *columns, config in _FACTS.run(connection, {"ids": wanted})]
    ledger = ledger_of(connection, [facts.id for facts, _ in found])
    # After the query that locks the rows, for the reason given at `teaching_sessions`.
    undecided = [
        facts.id
        for facts, _ in found
        if not _facts(facts, rewarded=False, ends=facts.id in endings).is_decided_elsewhere
    ]
    teaching = teaching_sessions(connection, undecided)
    # Only for runs that learn from texts: other runs save the query.
    described = sessions_with_texts(
        connection, [facts.id for facts, config in found if reward_rules_in(config).texts_train]
    )
    settled: list[_Facts] = []
    for before, config in found:
        facts = _ended(before, endings[before.id], now) if before.id in endings else before
        lineage = _lineage(connection, before.id) if facts.training in _TAKEN else None
        rules = reward_rules_in(config)
        facts = _settled(
            facts,
            ledger[before.id],
            lineage,
            rules,
            now,
            teaches=before.id in teaching,
            described=before.id in described,
        )
        if facts.training != before.training:
            done.changed.append(before.id)
        if facts.state != before.state:
            done.ended.append(before.id)
            _enqueue_judging(connection, facts, config, now)
        if facts != before:
            settled.append(facts)
    _write(connection, settled)
    return done


def _enqueue_judging(connection: Connection, facts: _Facts, config: str, now: float) -> None:
    """Let the run's judges score a session that has just ended, unless there is nothing to judge."""
    if facts.turn_count and facts.erased_at is None and facts.outcome not in GIVEN_UP:
        enqueue_judging(connection, facts.run_id, _cached(config)[0].judges, facts.id, now=now)


def _write(connection: Connection, settled: Sequence[_Facts]) -> None:
    # One statement for all on PostgreSQL, where each costs a round trip.
    if len(settled) > 1 and connection.dialect.name == "postgresql":
        names = ("id", *_SETTLED)
        _SETTLE_ALL.run(connection, {name: [getattr(facts, name) for facts in settled] for name in names})
        return
    for facts in settled:
        _SETTLE.run(connection, {"of": facts.id, **{name: getattr(facts, name) for name in _SETTLED}})


def ledger_of(connection: Connection, session_ids: Sequence[str]) -> dict[str, list[LedgerEntry]]:
    """Return the reward entries of each session, in order of arrival."""
    entries: dict[str, list[LedgerEntry]] = {session_id: [] for session_id in session_ids}
    for session_id, *row in _LEDGER.run(connection, {"ids": session_ids}):
        entries[session_id].append(_entry(row))
    return entries


def _entry(row: Sequence[Any]) -> LedgerEntry:
    return LedgerEntry(**dict(zip(LedgerEntry.__struct_fields__, row, strict=True)))


class _Facts(NamedTuple):
    """The columns of a session that `settle` reads."""

    id: str
    run_id: str
    purpose: str
    state: str
    training: str
    outcome: str | None
    turn_count: int
    reward: float | None
    revised_at: float | None
    ready_at: float | None
    erased_at: float | None
    held_back: bool
    end_reason: str | None
    ended_at: float | None
    last_active_at: float


# The columns that `settle` writes.
_SETTLED = ("state", "end_reason", "ended_at", "outcome", "reward", "training", "ready_at", "revised_at")


class _Lineage(msgspec.Struct, frozen=True):
    """The rewards that a claim recorded for a session, and the rules that combined them; None means the run's."""

    reward_ids: list[str]
    rules: RewardRules | None


def _ended(row: _Facts, ending: Ending, now: float) -> _Facts:
    """Return the row after the request to end the session."""
    before = SessionEnd(
        reason=EndReason(row.end_reason) if row.end_reason is not None else None,
        outcome=Outcome(row.outcome) if row.outcome is not None else None,
    )
    after = ended(before, ending)
    row = row._replace(outcome=after.outcome)
    if row.state != SessionState.OPEN.value:
        return row
    # Not before its last turn, even if the clock was set back since: turns after the end are not trained.
    return row._replace(
        state=SessionState.ENDED.value, end_reason=after.reason, ended_at=max(now, row.last_active_at)
    )


def _settled(
    row: _Facts,
    entries: Sequence[LedgerEntry],
    lineage: _Lineage | None,
    rules: RewardRules,
    now: float,
    *,
    teaches: bool,
    described: bool,
) -> _Facts:
    """Return the row with everything that is derived from the facts. `rules` are the run's. `described`: the run
    learns from texts, and the session has one."""
    rules = lineage.rules if lineage is not None and lineage.rules is not None else rules
    rewards = session_rewards(entries, rules)
    training = training_state(_facts(row, rewarded=rewards.may_be_trained(described=described), teaches=teaches))
    is_new = training is TrainingState.READY and row.training != TrainingState.READY.value
    revised = None
    if training is TrainingState.CONSUMED and lineage is not None:
        revised = revised_at(entries, lineage.reward_ids, rules)
    return row._replace(
        reward=rewards.reward,
        training=training.value,
        ready_at=now if is_new else row.ready_at,
        revised_at=revised,
    )


def _lineage(connection: Connection, session_id: str) -> _Lineage | None:
    """Return the lineage of a leased or consumed session."""
    row = connection.execute(_LINEAGE, {"of": session_id}).one_or_none()
    return None if row is None else _Lineage(row.reward_ids, _rules(row.reward_rules))


def reward_rules_in(config: str) -> RewardRules:
    """Return the reward rules of a run from its configuration as JSON text."""
    return _cached(config)[1]


def trains_passed_only(config: str) -> bool:
    """Return whether a run's trainer waits until a new version has passed its gates, from the run's configuration as
    JSON text."""
    release = _cached(config)[0].release
    return release.policy != "immediate" and release.train_from == "passed"


@lru_cache(maxsize=64)
def _cached(config: str) -> tuple[RunSettings, RewardRules]:
    # Cached, as it is called for every settled session and a run has few configurations.
    settings = RunSettings.model_validate(json.loads(config))
    return settings, settings.reward_rules


def _rules(stored: Any) -> RewardRules | None:
    return None if stored is None else msgspec.convert(stored, RewardRules)


_TAKEN = (TrainingState.LEASED.value, TrainingState.CONSUMED.value)

_OF = SessionRow.id == bindparam("of")

# FOR NO KEY UPDATE: turns and rewards that refer to a locked session can still be inserted.
_FACTS = Prepared(
    select(*(getattr(SessionRow, name) for name in _Facts._fields), cast(RunRow.config, Text))
    .join(RunRow, RunRow.id == SessionRow.run_id)
    .where(among(SessionRow.id, "ids"))
    .order_by(SessionRow.id)  # the lock order: see `lock_sessions`
    .with_for_update(key_share=True, of=SessionRow)
)

_LOCK = Prepared(
    select(SessionRow.id).where(among(SessionRow.id, "ids")).order_by(SessionRow.id).with_for_update(key_share=True)
)

_ENTRY = tuple(getattr(RewardRow, name) for name in LedgerEntry.__struct_fields__)

_LEDGER = Prepared(
    select(RewardRow.session_id, *_ENTRY).where(among(RewardRow.session_id, "ids")).order_by(RewardRow.sequence)
)

_LINEAGE = (
    select(ClaimedSessionRow.session_id, ClaimedSessionRow.reward_ids, ClaimRow.reward_rules)
    .join(
        SessionRow,
        (SessionRow.id == ClaimedSessionRow.session_id) & (SessionRow.claim_id == ClaimedSessionRow.claim_id),
    )
    .join(ClaimRow, ClaimRow.id == ClaimedSessionRow.claim_id)
    .where(_OF)
)

# All columns every time, changed or not: one prepared statement serves every kind of change.
_SETTLE = Prepared(update(SessionRow).where(_OF).values({name: bindparam(name) for name in _SETTLED}))


def _settle_all() -> Update:
    """Return the statement that settles several sessions on PostgreSQL."""
    row = SessionRow.__table__.c
    types = {name: Double() if isinstance(row[name].type, Float) else Text() for name in ("id", *_SETTLED)}
    given = given_rows(**types)
    return update(SessionRow).where(SessionRow.id == given.c.id).values({name: given.c[name] for name in _SETTLED})


_SETTLE_ALL = Prepared(_settle_all())


def _facts(row: _Facts, *, rewarded: bool, teaches: bool = True, ends: bool = False) -> SessionFacts:
    """Return the facts that decide the training state. `ends`: the session is about to end."""
    return SessionFacts(
        purpose=Purpose(row.purpose),
        state=SessionState.ENDED if ends else SessionState(row.state),
        training=TrainingState(row.training),
        outcome=Outcome(row.outcome) if row.outcome is not None else None,
        turn_count=row.turn_count,
        rewarded=rewarded,
        teaches=teaches,
        barred=bool(row.held_back) or row.erased_at is not None,
    )
