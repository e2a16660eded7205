"""Recording of rewards and texts: writes them, ends a session whose reward is final, and makes it trainable."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Any, NamedTuple, Protocol, Self

import msgspec
from sqlalchemy import Connection

from proxy.auth.access import Principal, Right, require_right
from proxy.clock import Clock
from proxy.contract.identifiers import (
    RewardId,
    RunId,
    SessionId,
    TextId,
    TurnId,
    is_session_id,
    new_reward_id,
    new_text_id,
)
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

# Separates the client's idempotency key from the entry's name in the stored key. Clients' keys are printable, so the
# control character cannot be part of one.
_KEY_END = "\x1f"

_WITH_THE_TRAINER = (TrainingState.LEASED.value, TrainingState.CONSUMED.value)


class Effect(StrEnum):
    """The effect of a recorded reward or text. `recorded_after_training`: a trainer had already claimed the session,
    so the entry is only stored and shown; it counts if the trainer returns the session untrained."""

    RECORDED = "recorded"
    RECORDED_AFTER_TRAINING = "recorded_after_training"


class FeedbackItem(msgspec.Struct, frozen=True, kw_only=True):
    """Rewards by name, each name once, a text, or both, for one session or turn.

    Without `session_id` and `turn_id` they are for the session of a session key. `run` is the run whose session
    names are meant, if the key belongs to no run. `final` None means that a reward for a session ends the session;
    a reward for a turn and a text alone do not.
    """

    entries: tuple[tuple[str, float], ...]
    session_id: str | None = None
    turn_id: str | None = None
    run: str | None = None
    source: str = DEFAULT_SOURCE
    comment: str | None = None
    text: str | None = None
    final: bool | None = None
    idempotency_key: str | None = None


class Receipt(msgspec.Struct, frozen=True, kw_only=True):
    """The result of recording an item; every repetition of an idempotency key gets the same receipt."""

    effect: Effect
    session_id: SessionId
    turn_id: TurnId | None
    rewards: tuple[RewardId, ...]
    text: TextId | None = None


class FeedbackObserver(Protocol):
    """Receives recorded entries after their commit, for metrics. It must neither raise nor block."""

    def rewards_recorded(self, entries: int, *, effect: str) -> None: ...

    def text_recorded(self, *, effect: str) -> None: ...

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
        """Record all items or, on any error, none. They are durable when the method returns.

        Raise NotFound for an unknown session or turn, Gone for an erased one, PermissionDenied if the key belongs to
        another session, InvalidRequest if no session or turn is given. With several items, `param` names the one.
        """
        require_right(principal, Right.REWARD)
        now = self._clock()
        recorded = await self._database.commit(
            _Recording(principal, items, now),
            order_key=(items[0].session_id if len(items) == 1 else None) or principal.session_id,
        )
        self._signals.endings.notify(recorded.endings)
        if recorded.changed:
            self._signals.trajectories.notify()
        if self._observer is not None:
            for receipt in recorded.new_receipts:
                if receipt.rewards:
                    self._observer.rewards_recorded(len(receipt.rewards), effect=receipt.effect.value)
                if receipt.text is not None:
                    self._observer.text_recorded(effect=receipt.effect.value)
        return recorded.receipts

    async def prefer(self, principal: Principal, item: PreferenceItem) -> PreferenceReceipt:
        """Record a preference; it is durable when the method returns. It neither ends a session nor trains it.

        Raise NotFound for an unknown session or turn, InvalidRequest if both sides are the same, one contains the
        other, or they belong to different runs.
        """
        require_right(principal, Right.PREFER)
        now = self._clock()
        receipt, is_new = await self._database.commit(lambda connection: prefer(connection, principal, item, now=now))
        if is_new:
            self._signals.events.notify()
            if self._observer is not None:
                self._observer.preference_recorded()
        return receipt

    async def apply_changed_rules(self) -> None:
        """Recombine the rewards of runs whose reward rules have changed. Call it when the proxy starts."""
        if await apply_changed_rules(self._database, self._clock):
            self._signals.trajectories.notify()


class _Recorded(msgspec.Struct, frozen=True):
    """The result of one request: the receipts of all items and those of items that were not repetitions, the sessions
    that a final reward ends, and the sessions whose training state changed."""

    receipts: list[Receipt]
    new_receipts: list[Receipt]
    endings: dict[str, Ending]
    changed: list[str]


class _NewRows(NamedTuple):
    """The rows that one or several writes insert."""

    rewards: list[dict[str, Any]]
    texts: list[dict[str, Any]]


class _Recording(Together[_Recorded]):
    """The write of one request. The group commit runs several such writes with one set of queries."""

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
        # One query locks the sessions of all writes; a single one is found by its item's own query.
        known = {row.id: row for row in repository.sessions(list(named))} if len(named) > 1 else {}
        found = [_Recorded([], [], {}, []) for _ in writes]
        rows = _NewRows([], [])
        answered: _Answered = {}
        for write, recorded in zip(writes, found, strict=True):
            write._take(connection, known, answered, recorded, rows)
        repository.insert(rows.rewards)
        repository.insert_texts(rows.texts)
        endings = {session_id: ending for recorded in found for session_id, ending in recorded.endings.items()}
        touched = dict.fromkeys(row["session_id"] for row in (*rows.rewards, *rows.texts))
        settled = settle(connection, touched, now=max(write._now for write in writes), endings=endings)
        # One result suffices: the signal that follows wakes all waiters of this process.
        found[0].changed.extend(settled.changed)
        return found

    def _named(self) -> Iterator[str]:
        """Yield the session ids that the items name or, naming nothing, take from the key."""
        for item in self._items:
            name = item.session_id or (self._principal.session_id if item.turn_id is None else None)
            if name is not None and is_session_id(name):
                yield name

    def _take(
        self,
        connection: Connection,
        known: Mapping[str, FoundSession],
        answered: _Answered,
        recorded: _Recorded,
        new: _NewRows,
    ) -> None:
        """Add the items' rows to `new` and their results to `recorded`."""
        for index, item in enumerate(self._items):
            try:
                target = Finder(connection, self._principal, item.run, known).of_reward(item.session_id, item.turn_id)
                receipt = _repeated(connection, target, item, answered)
            except BaseRlError as error:
                raise _placed(error, index if len(self._items) > 1 else None) from error
            if receipt is None:
                rewards, texts = _reward_rows(target, item, self._now), _text_rows(target, item, self._now)
                receipt = _receipt(
                    session_id=target.session_id,
                    turn_id=target.turn_id,
                    rewards=[row["id"] for row in rewards],
                    text=texts[0]["id"] if texts else None,
                    after_training=target.training in _WITH_THE_TRAINER,
                )
                recorded.new_receipts.append(receipt)
                if _is_final(item, target):
                    reason = EndReason.REWARD if item.entries else EndReason.EXPLICIT
                    recorded.endings[target.session_id] = Ending(reason)
                if item.idempotency_key is not None:
                    answered[target.run_id, item.idempotency_key] = receipt
                new.rewards.extend(rewards)
                new.texts.extend(texts)
            recorded.receipts.append(receipt)


# Receipts of this transaction by run and idempotency key. Their rows are not written yet, so a query would miss them.
_Answered = dict[tuple[RunId, str], Receipt]


def _repeated(connection: Connection, target: Target, item: FeedbackItem, answered: _Answered) -> Receipt | None:
    """Return the receipt of the first use of the item's idempotency key, or None. Raise InvalidRequest if it was used
    for another session."""
    if item.idempotency_key is None:
        return None
    receipt = answered.get((target.run_id, item.idempotency_key)) or _stored(connection, target, item.idempotency_key)
    if receipt is not None and receipt.session_id != target.session_id:
        raise InvalidRequest("this idempotency_key was already used for another session", param="idempotency_key")
    return receipt


def _stored(connection: Connection, target: Target, key: str) -> Receipt | None:
    repository = FeedbackRepository(connection)
    rewards = repository.under_key(run_id=target.run_id, first=key + _KEY_END, last=key + chr(ord(_KEY_END) + 1))
    text = repository.text_under_key(run_id=target.run_id, idempotency_key=key)
    first = rewards[0] if rewards else text
    if first is None:
        return None
    return _receipt(
        session_id=SessionId(first.session_id),
        turn_id=first.turn_id,
        rewards=[row.id for row in rewards],
        text=None if text is None else text.id,
        after_training=first.after_training,
    )


def _reward_rows(target: Target, item: FeedbackItem, now: float) -> list[dict[str, Any]]:
    return [
        {
            **_row(target, item, now),
            "id": new_reward_id(),
            "name": name,
            "value": value,
            "comment": item.comment,
            "idempotency_key": item.idempotency_key + _KEY_END + name if item.idempotency_key else None,
        }
        for name, value in item.entries
    ]


def _text_rows(target: Target, item: FeedbackItem, now: float) -> list[dict[str, Any]]:
    """Return the row of the item's text; none without a text."""
    if item.text is None:
        return []
    row = {"id": new_text_id(), "text": item.text, "idempotency_key": item.idempotency_key}
    return [{**_row(target, item, now), **row}]


def _row(target: Target, item: FeedbackItem, now: float) -> dict[str, Any]:
    """Return the columns that a reward and a text have in common."""
    return {
        "run_id": target.run_id,
        "session_id": target.session_id,
        "turn_id": target.turn_id,
        "source": item.source,
        "after_training": target.training in _WITH_THE_TRAINER,
        "created_at": now,
    }


def _is_final(item: FeedbackItem, target: Target) -> bool:
    # A text alone ends nothing by default: people comment on conversations that continue.
    return item.final if item.final is not None else target.turn_id is None and bool(item.entries)


def _receipt(
    *,
    session_id: SessionId,
    turn_id: TurnId | None,
    rewards: Sequence[RewardId],
    text: TextId | None,
    after_training: bool,
) -> Receipt:
    effect = Effect.RECORDED_AFTER_TRAINING if after_training else Effect.RECORDED
    return Receipt(effect=effect, session_id=session_id, turn_id=turn_id, rewards=tuple(rewards), text=text)


def _placed(error: BaseRlError, index: int | None) -> BaseRlError:
    """Return the error with the index of its item in a batch."""
    if index is None:
        return error
    param = f"[{index}].{error.param}" if error.param else f"[{index}]"
    return type(error)(f"{param}: {error.message}", param=param, retry_after=error.retry_after)
