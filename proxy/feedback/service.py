"""Takes rewards: writes the ledger, ends the session where the reward is final, and makes it trainable."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Any, Protocol, Self

import msgspec
from sqlalchemy import Connection

from proxy.auth.http import require
from proxy.auth.service import Principal, PrincipalKind
from proxy.clock import Clock
from proxy.contract.identifiers import RewardId, RunId, SessionId, TurnId, is_session_id, new_reward_id
from proxy.contract.reward import DEFAULT_SOURCE
from proxy.contract.states import EndReason, TrainingState
from proxy.database.group_commit import Together
from proxy.database.unit_of_work import Database
from proxy.errors import BaseRlError, InvalidRequest
from proxy.feedback.preferences import PreferenceItem, PreferenceReceipt, prefer
from proxy.feedback.repository import FeedbackRepository, FoundSession
from proxy.feedback.rules import apply_changed_rules
from proxy.feedback.targets import Finder, Target
from proxy.lifecycle.lifecycle import settle
from proxy.lifecycle.outcomes import Ending
from proxy.lifecycle.signals import Signals

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
    neither is named. `run`: whose name for the session it is, where the key has no run. `final` None: a session's
    rewards end it, a turn's do not."""

    entries: tuple[tuple[str, float], ...]
    session_id: str | None = None
    turn_id: str | None = None
    run: str | None = None
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

    def preference_recorded(self) -> None: ...


class FeedbackService:
    def __init__(
        self,
        database: Database,
        signals: Signals,
        clock: Clock,
        observer: FeedbackObserver | None = None,
    ) -> None:
        self._database = database
        self._signals = signals
        self._clock = clock
        self._observer = observer

    async def record(self, principal: Principal, items: Sequence[FeedbackItem]) -> list[Receipt]:
        """Records all items or, on any error, none; durable when it returns.

        Raises NotFound for an unknown session or turn, Gone for one that was erased, PermissionDenied for another
        session than the key's, InvalidRequest where nothing is named; of several items, `param` says which.
        """
        require(principal, PrincipalKind.ADMIN, PrincipalKind.RUN, PrincipalKind.SESSION)
        now = self._clock()
        recorded = await self._database.commit(
            _Recording(principal, items, now),
            order_key=(items[0].session_id if len(items) == 1 else None) or principal.session_id,
        )
        if recorded.endings:
            self._signals.endings.notify(list(recorded.endings))
        if recorded.changed:
            self._signals.trajectories.notify()
        if self._observer is not None:
            for count, effect in recorded.new_entries:
                self._observer.rewards_recorded(count, effect=effect.value)
        return recorded.receipts

    async def prefer(self, principal: Principal, item: PreferenceItem) -> PreferenceReceipt:
        """Records a preference; durable when it returns. It is no reward: no session is ended or trained for it.

        Raises NotFound for an unknown session or turn, InvalidRequest where both are the same, one holds the other,
        or they are of different runs.
        """
        require(principal, PrincipalKind.ADMIN, PrincipalKind.RUN)
        now = self._clock()
        receipt, is_new = await self._database.commit(lambda connection: prefer(connection, principal, item, now=now))
        if is_new:
            self._signals.events.notify()
            if self._observer is not None:
                self._observer.preference_recorded()
        return receipt

    async def apply_changed_rules(self) -> None:
        """To be called at the start: rewards are combined anew in runs whose rules have changed."""
        if await apply_changed_rules(self._database, self._clock):
            self._signals.trajectories.notify()


class _Recorded(msgspec.Struct, frozen=True):
    """What became of all items: `new_entries` are numbers of entries, `endings` sessions with a final one, `changed`
    those whose training state did."""

    receipts: list[Receipt]
    new_entries: list[tuple[int, Effect]]
    endings: dict[str, Ending]
    changed: list[str]


class _Recording(Together[_Recorded]):
    """Items of one request: all or none."""

    def __init__(self, principal: Principal, items: Sequence[FeedbackItem], now: float) -> None:
        self._principal = principal
        self._items = items
        self._now = now

    def __call__(self, connection: Connection) -> _Recorded:
        return self.together(connection, [self])[0]

    @classmethod
    def together(cls, connection: Connection, writes: Sequence[Self]) -> list[_Recorded]:
        repository = FeedbackRepository(connection)
        named = {name: None for write in writes for name in write._named()}
        known = {row.id: row for row in repository.sessions(list(named))} if len(named) > 1 else {}
        found = [_Recorded([], [], {}, []) for _ in writes]
        rows: list[dict[str, Any]] = []
        answered: _Answered = {}
        for write, recorded in zip(writes, found, strict=True):
            rows += write._take(connection, known, answered, recorded)
        repository.insert(rows)
        endings = {session_id: ending for recorded in found for session_id, ending in recorded.endings.items()}
        touched = dict.fromkeys(row["session_id"] for row in rows)
        settled = settle(connection, touched, now=max(write._now for write in writes), endings=endings)
        found[0].changed.extend(settled.changed)  # whoever of them says it, all who wait for it are told
        return found

    def _named(self) -> Iterator[str]:
        """The ids of ours that it names or, naming nothing, means."""
        for item in self._items:
            name = item.session_id or (self._principal.session_id if item.turn_id is None else None)
            if name is not None and is_session_id(name):
                yield name

    def _take(
        self, connection: Connection, known: Mapping[str, FoundSession], answered: _Answered, recorded: _Recorded
    ) -> Iterator[dict[str, Any]]:
        """The new rows of the ledger; what becomes of the items is put into `recorded`."""
        for index, item in enumerate(self._items):
            try:
                target = Finder(connection, self._principal, item.run, known).of_reward(item.session_id, item.turn_id)
                receipt = _repeated(connection, target, item, answered)
            except BaseRlError as error:
                raise _placed(error, index if len(self._items) > 1 else None) from error
            if receipt is None:
                rows = _rows(target, item, self._now)
                receipt = _receipt(
                    session_id=target.session_id,
                    turn_id=target.turn_id,
                    rewards=[row["id"] for row in rows],
                    after_training=target.training in _WITH_THE_TRAINER,
                )
                recorded.new_entries.append((len(rows), receipt.effect))
                if _is_final(item, target):
                    recorded.endings[target.session_id] = Ending(EndReason.REWARD)
                if item.idempotency_key is not None:
                    answered[target.run_id, item.idempotency_key] = receipt
                yield from rows
            recorded.receipts.append(receipt)


_Answered = dict[tuple[RunId, str], Receipt]
"""The answers of this transaction, by run and idempotency key: their rows are not yet written."""


def _repeated(connection: Connection, target: Target, item: FeedbackItem, answered: _Answered) -> Receipt | None:
    """The answer of the first time this idempotency key came."""
    if item.idempotency_key is None:
        return None
    receipt = answered.get((target.run_id, item.idempotency_key)) or _stored(connection, target, item.idempotency_key)
    if receipt is not None and receipt.session_id != target.session_id:
        raise InvalidRequest("this idempotency_key was used for a reward of another session", param="idempotency_key")
    return receipt


def _stored(connection: Connection, target: Target, key: str) -> Receipt | None:
    rows = FeedbackRepository(connection).under_key(
        run_id=target.run_id, first=key + _KEY_END, last=key + chr(ord(_KEY_END) + 1)
    )
    if not rows:
        return None
    return _receipt(
        session_id=SessionId(rows[0].session_id),
        turn_id=rows[0].turn_id,
        rewards=[row.id for row in rows],
        after_training=rows[0].after_training,
    )


def _rows(target: Target, item: FeedbackItem, now: float) -> list[dict[str, Any]]:
    return [
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
            "after_training": target.training in _WITH_THE_TRAINER,
            "created_at": now,
        }
        for name, value in item.entries
    ]


def _is_final(item: FeedbackItem, target: Target) -> bool:
    return item.final if item.final is not None else target.turn_id is None


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
