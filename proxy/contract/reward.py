"""Rewards: append-only statements about a session or one of its turns."""

from __future__ import annotations

import math

import msgspec

from proxy.contract.identifiers import RewardId, SessionId, TurnId

DEFAULT_NAME = "reward"
DEFAULT_SOURCE = "api"


class Reward(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of the ledger. `turn_id` None means the whole session.

    A later entry with the same (session, turn, name, source) supersedes an earlier one; both stay.
    """

    id: RewardId
    session_id: SessionId
    turn_id: TurnId | None
    name: str
    value: float
    source: str
    comment: str | None
    created_at: float

    def __post_init__(self) -> None:
        if not math.isfinite(self.value):
            raise ValueError(f"a reward is a finite number, not {self.value}")
