"""Recombines rewards after a change of a run's reward rules, except in sessions that a trainer has claimed."""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec
from sqlalchemy import Connection

from proxy.clock import Clock
from proxy.contract.reward import RewardRules
from proxy.database.tables import FeedbackTextRow, RewardRow
from proxy.database.unit_of_work import Database
from proxy.feedback.repository import RulesRepository
from proxy.lifecycle.lifecycle import settle
from proxy.settings import RunSettings

# Rewards or texts per transaction, which other writes wait for.
ENTRIES_AT_ONCE = 500


async def apply_changed_rules(database: Database, clock: Clock) -> bool:
    """Recombine the rewards of runs whose rules have changed. Return whether there were any.

    The work is done in bounded transactions. A run's rules are marked as applied only after the last of its sessions,
    so the next call repeats the work of a process that was killed.
    """
    changed = {
        row.id: rules
        for row in await database.read(lambda connection: RulesRepository(connection).runs())
        if (rules := _rules(row.config)) != _applied(row.reward_rules)
    }
    for table in (RewardRow, FeedbackTextRow):
        after: int | None = 0
        while changed and after is not None:
            some = partial(_settle_some, table=table, run_ids=set(changed), after=after, now=clock())
            after = await database.commit(some)
    for run_id, rules in changed.items():
        await database.commit(partial(_note, run_id=run_id, rules=rules))
    return bool(changed)


def _settle_some(
    connection: Connection,
    *,
    table: type[RewardRow | FeedbackTextRow],
    run_ids: set[str],
    after: int,
    now: float,
) -> int | None:
    """Settle the sessions of the next rewards or texts. Return the sequence to continue after, None at the end."""
    entries = RulesRepository(connection).entries(table, after, ENTRIES_AT_ONCE)
    settle(connection, list(dict.fromkeys(row.session_id for row in entries if row.run_id in run_ids)), now=now)
    return entries[-1].sequence if len(entries) == ENTRIES_AT_ONCE else None


def _note(connection: Connection, *, run_id: str, rules: RewardRules) -> None:
    repository = RulesRepository(connection)
    if _rules(repository.config(run_id)) == rules:
        repository.set_applied(run_id, msgspec.to_builtins(rules))


def _rules(config: dict[str, Any]) -> RewardRules:
    return RunSettings.model_validate(config).reward_rules


def _applied(stored: dict[str, Any] | None) -> RewardRules | None:
    return None if stored is None else msgspec.convert(stored, RewardRules)
