"""Takes rewards: writes the ledger, ends the session where the reward is final, and makes it trainable."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, Protocol

import msgspec
from sqlalchemy import Connection

from proxy.clock import Clock
from proxy.contract.identifiers import RewardId, RunId, SessionId, TurnId, new_reward_id
from proxy.contract.reward import DEFAULT_SOURCE
from proxy.credentials.http import require
from proxy.credentials.service import Principal, PrincipalKind
from proxy.database.lifecycle import EndReason, TrainingState, end_session, settle
from proxy.database.signals import Signals
from proxy.database.unit_of_work import Database
from proxy.errors import BaseRlError, InvalidRequest, NotFound, PermissionDenied
from proxy.feedback.repository import AnyRow, FeedbackRepository
from proxy.runs.service import RunDirectory

_KEY_END = "\x1f"
"""Closes the client's part of a stored idempotency key, before the entry's name; clients' keys hold no controls."""

_WITH_THE_TRAINER = (TrainingState.LEASED.value, TrainingState.CONSUMED.value)


class Effect(StrEnum):
    """`recorded_after_training`: a trainer had the session already; the entry is kept and shown. Should the trainer
    give the session back untrained, the entry counts after all."""

    RECORDED = "recorded"
    RECORDED_AFTER_TRAINING = "recorded_after_training"


class FeedbackItem(msgspec.Struct, frozen=True, kw_only=True):
    """One statement: entries by name, each name once, about a session or a turn; about the session key's own where
    neither is named. `final` None: a session's rewards end it, a turn's do not."""

    entries: tuple[tuple[str, float], ...]
    session_id: str | None = None
    turn_id: str | None = None
    source: str = DEFAULT_SOURCE
    comment: str | None = None
    final: bool | None = None
    idempotency_key: str | None = None


class Receipt(msgspec.Struct, frozen=True, kw_only=True):
    """What became of an item. The same for every repetition of an idempotency key."""

    effect: Effect
    session_id: SessionId
    turn_id: TurnId | None
    rewards: tuple[RewardId, ...]


class FeedbackObserver(Protocol):
    """Hears of entries after their commit: metrics. It must not raise and not wait."""

    def rewards_recorded(self, entries: int, *, effect: str) -> None: ...


class _Target(msgspec.Struct, frozen=True):
    session_id: SessionId
    run_id: RunId
    training: str
    turn_id: TurnId | None


class FeedbackService:
    def __init__(
        self,
        database: Database,
        runs: RunDirectory,
        signals: Signals,
        clock: Clock,
        observer: FeedbackObserver | None = None,
    ) -> None:
        self._database = database
        self._runs = runs
        self._signals = signals
        self._clock = clock
        self._observer = observer

    async def record(self, principal: Principal, items: Sequence[FeedbackItem]) -> list[Receipt]:
        """Records all items or, on any error, none; durable when it returns.

        Raises NotFound for an unknown session or turn, PermissionDenied for another session than the key's,
        InvalidRequest where nothing is named; of several items, `param` says which.
        """
        require(principal, PrincipalKind.ADMIN, PrincipalKind.RUN, PrincipalKind.SESSION)
        weights = await self._weights(principal)
        now = self._clock()
        recorded = await self._database.transact(
            lambda connection: _record(connection, principal, items, weights=weights, now=now)
        )
        if recorded.ended:
            self._signals.endings.notify(recorded.ended)
        if recorded.changed:
            self._signals.trajectories.notify()
        if self._observer is not None:
            for count, effect in recorded.new_entries:
                self._observer.rewards_recorded(count, effect=effect.value)
        return recorded.receipts

    async def _weights(self, principal: Principal) -> dict[RunId, dict[str, float]]:
        """The reward weights of every run that this key may speak about."""
        if principal.run_id is not None:
            return {principal.run_id: (await self._runs.settings_of(principal.run_id)).reward_weights}
        return {run.id: run.settings.reward_weights for run in await self._runs.list_()}


class _Recorded(msgspec.Struct, frozen=True):
    """What became of all items: `new_entries` are numbers of entries, `ended` and `changed` sessions."""

    receipts: list[Receipt]
    new_entries: list[tuple[int, Effect]]
    ended: list[str]
    changed: list[str]


def _record(
    connection: Connection,
    principal: Principal,
    items: Sequence[FeedbackItem],
    *,
    weights: Mapping[RunId, Mapping[str, float]],
    now: float,
) -> _Recorded:
    found = _Recorded([], [], [], [])
    touched: dict[RunId, dict[str, None]] = {}
    for index, item in enumerate(items):
        try:
            target = _target(connection, principal, item)
            receipt = _repeated(connection, target, item)
        except BaseRlError as error:
            raise _placed(error, index if len(items) > 1 else None) from error
        if receipt is None:
            receipt = _append(connection, target, item, now)
            touched.setdefault(target.run_id, {})[target.session_id] = None
            found.new_entries.append((len(item.entries), receipt.effect))
            if _is_final(item, target):
                found.ended.append(target.session_id)
        found.receipts.append(receipt)
    for run_id, sessions in touched.items():
        found.changed.extend(settle(connection, list(sessions), reward_weights=weights[run_id], now=now))
    return found


def _target(connection: Connection, principal: Principal, item: FeedbackItem) -> _Target:
    repository = FeedbackRepository(connection)
    named = item.session_id
    if item.turn_id is not None:
        of_turn = repository.session_of_turn(item.turn_id, run_id=principal.run_id)
        if of_turn is None:
            raise NotFound(f"there is no turn {item.turn_id!r}", param="turn_id")
        row = _session(repository, of_turn if named is None else named, principal)
        if row.id != of_turn:
            raise InvalidRequest(f"the turn {item.turn_id} belongs to another session", param="turn_id")
    elif named is not None:
        row = _session(repository, named, principal)
    elif principal.session_id is not None:
        row = _session(repository, principal.session_id, principal)
    else:
        raise InvalidRequest(
            "name a session_id, a turn_id or a completion_id; only a session's own key needs none",
            param="session_id",
        )
    turn_id = TurnId(item.turn_id) if item.turn_id is not None else None
    return _Target(SessionId(row.id), RunId(row.run_id), row.training, turn_id)


def _repeated(connection: Connection, target: _Target, item: FeedbackItem) -> Receipt | None:
    """The answer of the first time this idempotency key came."""
    if item.idempotency_key is None:
        return None
    first = item.idempotency_key + _KEY_END
    last = item.idempotency_key + chr(ord(_KEY_END) + 1)
    rows = FeedbackRepository(connection).under_key(run_id=target.run_id, first=first, last=last)
    if not rows:
        return None
    if rows[0].session_id != target.session_id:
        raise InvalidRequest("this idempotency_key was used for a reward of another session", param="idempotency_key")
    return _receipt(
        session_id=target.session_id,
        turn_id=rows[0].turn_id,
        rewards=[row.id for row in rows],
        after_training=rows[0].after_training,
    )


def _append(connection: Connection, target: _Target, item: FeedbackItem, now: float) -> Receipt:
    after_training = target.training in _WITH_THE_TRAINER
    rows: list[dict[str, Any]] = [
        {
            "id": new_reward_id(),
            "run_id": target.run_id,
            "session_id": target.session_id,
            "turn_id": target.turn_id,
            "name": name,
            "value": value,
            "source": item.source,
            "comment": item.comment,
            "idempotency_key": item.idempotency_key + _KEY_END + name if item.idempotency_key else None,
            "after_training": after_training,
            "created_at": now,
        }
        for name, value in item.entries
    ]
    FeedbackRepository(connection).insert(rows)
    if _is_final(item, target):
        end_session(connection, target.session_id, reason=EndReason.REWARD, outcome=None, now=now)
    return _receipt(
        session_id=target.session_id,
        turn_id=target.turn_id,
        rewards=[row["id"] for row in rows],
        after_training=after_training,
    )


def _is_final(item: FeedbackItem, target: _Target) -> bool:
    return item.final if item.final is not None else target.turn_id is None


def _session(repository: FeedbackRepository, name: str, principal: Principal) -> AnyRow:
    row = repository.session(name, run_id=principal.run_id)
    if principal.session_id is not None and (row is None or row.id != principal.session_id):
        raise PermissionDenied(f"this key belongs to the session {principal.session_id} alone", param="session_id")
    if row is None:
        raise NotFound(f"there is no session {name!r}", param="session_id")
    return row


def _receipt(
    *, session_id: SessionId, turn_id: TurnId | None, rewards: Sequence[RewardId], after_training: bool
) -> Receipt:
    effect = Effect.RECORDED_AFTER_TRAINING if after_training else Effect.RECORDED
    return Receipt(effect=effect, session_id=session_id, turn_id=turn_id, rewards=tuple(rewards))


def _placed(error: BaseRlError, index: int | None) -> BaseRlError:
    """The error with the place of its item in a batch."""
    if index is None:
        return error
    param = f"[{index}].{error.param}" if error.param else f"[{index}]"
    return type(error)(f"{param}: {error.message}", param=param, retry_after=error.retry_after)
