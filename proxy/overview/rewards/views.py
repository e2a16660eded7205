"""Views of ledger entries, revisions and preferences: frozen, JSON by field name."""

from __future__ import annotations

import msgspec


class RewardFilter(msgspec.Struct, frozen=True, kw_only=True):
    """The conditions that listed entries meet; None means any. `since` is inclusive, in seconds since the epoch.
    `after_training`: whether a trainer had claimed the session before the entry arrived."""

    session: str | None = None
    turn: str | None = None
    name: str | None = None
    source: str | None = None
    since: float | None = None
    after_training: bool | None = None


class RewardItem(msgspec.Struct, frozen=True, kw_only=True):
    """An entry of the ledger. `superseded`: a later entry of the same scope, name and source replaces it. `used_by`
    is the version whose step trained on this entry, `external_id` the client's name of the session."""

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
    """A page of the ledger, newest first; the last page has no `next_cursor`."""

    rewards: tuple[RewardItem, ...]
    next_cursor: str | None


class RevisedTurn(msgspec.Struct, frozen=True, kw_only=True):
    """A turn whose combined reward changed after the training. None means no reward."""

    turn_id: str
    reward_then: float | None
    reward_now: float | None


class RevisedSession(msgspec.Struct, frozen=True, kw_only=True):
    """A session whose rewards changed after the step of `version` trained on it.

    `entries` count now but were not trained on. `revised_at` is the time of the newest of them, `trained_at` that of
    the version's commit.
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
    """A page of revised sessions, the last revised first; the last page has no `next_cursor`."""

    sessions: tuple[RevisedSession, ...]
    next_cursor: str | None


class PreferenceView(msgspec.Struct, frozen=True, kw_only=True):
    """A recorded preference. Without a turn id, a side is the whole session."""

    id: str
    chosen_session_id: str
    chosen_turn_id: str | None
    rejected_session_id: str
    rejected_turn_id: str | None
    source: str
    comment: str | None
    created_at: float
