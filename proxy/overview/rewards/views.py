"""Entries of the ledger, revisions and preferences as views: JSON by field name."""

from __future__ import annotations

import msgspec


class RewardFilter(msgspec.Struct, frozen=True, kw_only=True):
    """None means any. `since` is in seconds since the epoch, inclusive. `after_training`: whether a trainer had the
    session already when the entry came."""

    session: str | None = None
    turn: str | None = None
    name: str | None = None
    source: str | None = None
    since: float | None = None
    after_training: bool | None = None


class RewardItem(msgspec.Struct, frozen=True, kw_only=True):
    """An entry of the ledger. `superseded`: a later entry of the same scope, name and source counts instead.
    `used_by` is the version whose step trained on this very entry, `external_id` the client's name of the session."""

    sequence: int
    id: str
    session_id: str
    turn_id: str | None
    name: str
    value: float
    source: str
    comment: str | None
    created_at: float
    after_training: bool
    superseded: bool
    used_by: int | None
    external_id: str | None = None


class RewardPage(msgspec.Struct, frozen=True, kw_only=True):
    """A page of the ledger, newest first. `next_cursor` None: this was the last page."""

    rewards: tuple[RewardItem, ...]
    next_cursor: str | None


class RevisedTurn(msgspec.Struct, frozen=True, kw_only=True):
    """A turn whose combined reward is another one now. None: no reward."""

    turn_id: str
    reward_then: float | None
    reward_now: float | None


class RevisedSession(msgspec.Struct, frozen=True, kw_only=True):
    """A session that the step of `version` trained on other rewards than it has now.

    `entries` are those that count now and were not used. `revised_at` is when the newest entry came that was not
    used, `trained_at` when the version was committed.
    """

    session_id: str
    external_id: str | None
    task: str | None
    version: int
    claim_id: str
    trained_at: float
    revised_at: float
    reward_then: float | None
    reward_now: float | None
    turns: tuple[RevisedTurn, ...]
    entries: tuple[RewardItem, ...]


class RevisedPage(msgspec.Struct, frozen=True, kw_only=True):
    """The last revised first. `next_cursor` None: this was the last page."""

    sessions: tuple[RevisedSession, ...]
    next_cursor: str | None


class PreferenceView(msgspec.Struct, frozen=True, kw_only=True):
    """That one thing went better than another. `turn_id` None: the whole session."""

    id: str
    chosen_session_id: str
    chosen_turn_id: str | None
    rejected_session_id: str
    rejected_turn_id: str | None
    source: str
    comment: str | None
    created_at: float
