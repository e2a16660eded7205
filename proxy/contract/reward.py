"""Rewards: append-only statements about a session or one of its turns, and how a run makes one number of them."""

from __future__ import annotations

import math
from enum import StrEnum

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


class NameRule(StrEnum):
    """How the values of several names become one. `first_of`: that of the first name in an order that is there."""

    WEIGHTED_SUM = "weighted_sum"
    MEAN = "mean"
    MIN = "min"
    MAX = "max"
    PRODUCT = "product"
    FIRST_OF = "first_of"


class SourceRule(StrEnum):
    """How the latest values of several sources of one name become one."""

    SUM = "sum"
    MEAN = "mean"


class RewardRules(msgspec.Struct, frozen=True, kw_only=True):
    """How a run combines entries about the same thing. Each name's value is multiplied by its weight, which is 1
    where `weights` has none; a name of weight 0 takes no part. `order` belongs to `first_of`. `low` and `high` bound
    the result."""

    weights: dict[str, float] = {}
    combine: NameRule = NameRule.WEIGHTED_SUM
    sources: SourceRule = SourceRule.SUM
    order: tuple[str, ...] = ()
    low: float | None = None
    high: float | None = None
