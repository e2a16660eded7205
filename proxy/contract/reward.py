"""Rewards: append-only statements about a session or one of its turns, and the rules that combine them."""

from __future__ import annotations

import math
from enum import StrEnum

import msgspec

from proxy.contract.identifiers import RewardId, SessionId, TurnId

DEFAULT_NAME = "reward"
DEFAULT_SOURCE = "api"


class Reward(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of the ledger. `turn_id` is None if it is about the whole session.

    A later entry with the same session, turn, name and source supersedes an earlier one; both stay in the ledger.
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
    """The rule that combines the values of several names. `first_of` takes the value of the first name, in a given
    order, that has one."""

    WEIGHTED_SUM = "weighted_sum"
    MEAN = "mean"
    MIN = "min"
    MAX = "max"
    PRODUCT = "product"
    FIRST_OF = "first_of"


class SourceRule(StrEnum):
    """The rule that combines the latest values of several sources of one name."""

    SUM = "sum"
    MEAN = "mean"


class RewardRules(msgspec.Struct, frozen=True, kw_only=True):
    """A run's rules for combining rewards of the same session or turn.

    Each name's value is multiplied by its weight: 1 if `weights` has none; names of weight 0 are ignored. `order` is
    used by `first_of`. `low` and `high` bound the result. With `texts_train`, a session with a text about it or one
    of its turns is trained even if nothing has a reward. A session without one of the names in `required` is not
    trained, whatever else it has.
    """

    weights: dict[str, float] = {}
    combine: NameRule = NameRule.WEIGHTED_SUM
    sources: SourceRule = SourceRule.SUM
    order: tuple[str, ...] = ()
    low: float | None = None
    high: float | None = None
    texts_train: bool = False
    required: tuple[str, ...] = ()
