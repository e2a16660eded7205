"""The rewards of sessions as a claim hands them out. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from proxy.contract.identifiers import TurnId
from proxy.database.lifecycle import LedgerEntry, combine


class NumberedEntry(LedgerEntry, frozen=True, kw_only=True):
    """An entry with its id, so that the step's lineage can name it."""

    id: str


class HandedRewards(msgspec.Struct, frozen=True, kw_only=True):
    """`reward_ids`: the entries that were valid, in order of arrival; superseded ones are not among them."""

    reward: float | None
    turn_rewards: dict[TurnId, float]
    reward_ids: tuple[str, ...]


def handed_rewards(entries: Iterable[NumberedEntry], weights: Mapping[str, float]) -> HandedRewards:
    """What one session's ledger (in order of arrival) comes to now."""
    valid: dict[tuple[str | None, str, str], NumberedEntry] = {}
    for entry in entries:
        valid[entry.turn_id, entry.name, entry.source] = entry
    of_turns: dict[str, list[NumberedEntry]] = {}
    of_session: list[NumberedEntry] = []
    for entry in valid.values():
        (of_session if entry.turn_id is None else of_turns.setdefault(entry.turn_id, [])).append(entry)
    turn_rewards = {TurnId(turn_id): combine(own, weights) for turn_id, own in of_turns.items()}
    return HandedRewards(
        reward=combine(of_session, weights),
        turn_rewards={turn_id: reward for turn_id, reward in turn_rewards.items() if reward is not None},
        reward_ids=tuple(entry.id for entry in valid.values()),
    )
