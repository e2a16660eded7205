"""Rules that combine the entries of the reward ledger into the rewards of a session and its turns.

Pure, so that claims, views of a session and the check for revised rewards compute the same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from proxy.contract.identifiers import TurnId
from proxy.contract.reward import NameRule, RewardRules, SourceRule

# The largest magnitude of a combined reward: a product of many factors stays finite, in float32 too.
_BOUND = 1e30


class LedgerEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A reward entry. `turn_id` is None for a reward of the whole session."""

    id: str
    turn_id: str | None
    name: str
    source: str
    value: float
    created_at: float


class SessionRewards(msgspec.Struct, frozen=True, kw_only=True):
    """The combined rewards of one session. `reward_ids` names the entries that count, in order of arrival, without
    superseded ones. `missing`: names that the rules require, and that neither the session nor a turn has."""

    reward: float | None
    turn_rewards: dict[TurnId, float]
    reward_ids: tuple[str, ...]
    missing: tuple[str, ...] = ()

    def may_be_trained(self, *, described: bool) -> bool:
        """Return whether the rewards let the session be trained. `described`: the run learns from texts, and the
        session has one."""
        return not self.missing and (self.reward is not None or bool(self.turn_rewards) or described)

    def differs_from(self, other: SessionRewards) -> bool:
        """Return whether any reward differs, whichever entries it comes from."""
        return (self.reward, self.turn_rewards) != (other.reward, other.turn_rewards)


def standing(entries: Iterable[LedgerEntry]) -> list[LedgerEntry]:
    """Return the entries that are not superseded: the last for each subject (turn or session), name and source.

    `entries` are one session's, in order of arrival.
    """
    latest: dict[tuple[str | None, str, str], LedgerEntry] = {}
    for entry in entries:
        about = (entry.turn_id, entry.name, entry.source)
        latest.pop(about, None)
        latest[about] = entry
    return list(latest.values())


def session_rewards(entries: Iterable[LedgerEntry], rules: RewardRules) -> SessionRewards:
    """Return the combined rewards. `entries` are one session's, in order of arrival."""
    valid = standing(entries)
    about: dict[str | None, list[LedgerEntry]] = {}
    for entry in valid:
        about.setdefault(entry.turn_id, []).append(entry)
    of_turns = {TurnId(turn): combine(own, rules) for turn, own in about.items() if turn is not None}
    return SessionRewards(
        reward=combine(about.get(None, ()), rules),
        turn_rewards={turn: reward for turn, reward in of_turns.items() if reward is not None},
        reward_ids=tuple(entry.id for entry in valid),
        missing=tuple(name for name in rules.required if all(entry.name != name for entry in valid)),
    )


def revised_at(entries: Sequence[LedgerEntry], trained_ids: Iterable[str], rules: RewardRules) -> float | None:
    """Return the time of the newest untrained entry if the rewards differ from the trained ones; None otherwise.

    `trained_ids` are the entries that the step used, `rules` the rules that it used.
    """
    trained = set(trained_ids)
    now = session_rewards(entries, rules)
    if not now.differs_from(session_rewards((entry for entry in entries if entry.id in trained), rules)):
        return None
    return max((entry.created_at for entry in entries if entry.id not in trained), default=None)


def combine(entries: Iterable[LedgerEntry], rules: RewardRules) -> float | None:
    """Return one reward for entries about the same subject, given in order of arrival.

    The latest value of each name and source counts. Return None if no entry takes part: absent is not zero.
    """
    latest = {(entry.name, entry.source): entry.value for entry in entries}
    by_name: dict[str, list[float]] = {}
    for (name, _source), value in sorted(latest.items()):
        by_name.setdefault(name, []).append(value)
    weighted = {
        name: rules.weights.get(name, 1.0) * _of_sources(values, rules.sources)
        for name, values in by_name.items()
        if rules.weights.get(name, 1.0) != 0
    }
    reward = _of_names(weighted, rules)
    return None if reward is None else _bounded(reward, rules)


def _of_sources(values: Sequence[float], rule: SourceRule) -> float:
    return sum(values) if rule is SourceRule.SUM else sum(values) / len(values)


def _of_names(weighted: Mapping[str, float], rules: RewardRules) -> float | None:
    """Combine the weighted values of all names. `weighted` has value times weight by name."""
    if rules.combine is NameRule.FIRST_OF:
        return next((weighted[name] for name in rules.order if name in weighted), None)
    values = list(weighted.values())
    if not values:
        return None
    if rules.combine is NameRule.MEAN:
        return sum(values) / sum(abs(rules.weights.get(name, 1.0)) for name in weighted)
    return _PLAIN[rules.combine](values)


def _product(values: Sequence[float]) -> float:
    # A 0 first: infinity times 0 would be NaN.
    return 0.0 if 0 in values else math.prod(values)


_PLAIN: dict[NameRule, Callable[[Sequence[float]], float]] = {
    NameRule.WEIGHTED_SUM: sum,
    NameRule.MIN: min,
    NameRule.MAX: max,
    NameRule.PRODUCT: _product,
}


def _bounded(reward: float, rules: RewardRules) -> float:
    low = -_BOUND if rules.low is None else rules.low
    high = _BOUND if rules.high is None else rules.high
    return min(max(reward, low), high)
