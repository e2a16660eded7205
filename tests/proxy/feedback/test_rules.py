"""Rules that change while there are rewards: untrained sessions follow, trained ones stay."""

from __future__ import annotations

from typing import Any

import pytest

from proxy.database.tables import RewardRow
from proxy.feedback import rules
from proxy.feedback.repository import RulesRepository
from proxy.settings import RunSettings
from tests.proxy.feedback.ledger import Ledger


async def test_sessions_that_are_not_trained_follow_the_rules(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rules, "ENTRIES_AT_ONCE", 2)
    sessions = [await ledger.session(test=float(number), style=10.0) for number in range(3)]
    unjudged = await ledger.session(style=1.0)
    assert [(await ledger.of(session))[1] for session in sessions] == [10.0, 11.0, 12.0]
    await ledger.reconfigure(rewards={"combine": "first_of", "order": ["test"]})
    assert [(await ledger.of(session))[:2] for session in sessions] == [
        ("ready", 0.0),
        ("ready", 1.0),
        ("ready", 2.0),
    ]
    assert (await ledger.of(unjudged))[:2] == ("pending", None)
    await ledger.reconfigure(rewards={"combine": "max", "high": 1.5}, reward_weights={"style": 0.0})
    assert [(await ledger.of(session))[1] for session in sessions] == [0.0, 1.0, 1.5]
    assert (await ledger.of(unjudged))[:2] == ("pending", None)
    await ledger.reconfigure()
    assert (await ledger.of(unjudged))[:2] == ("ready", 1.0)


async def test_trained_sessions_keep_their_rewards(ledger: Ledger) -> None:
    session = await ledger.session(test=1.0, style=0.5)
    batch = await ledger.claim()
    await ledger.commit(batch)
    await ledger.reconfigure(rewards={"combine": "min"})
    assert await ledger.of(session) == ("consumed", 1.5, None)
    await ledger.say(session, style=0.75)
    assert await ledger.of(session) == ("consumed", 1.75, ledger.world.clock.now)


async def test_a_trainers_session_is_trained_by_the_rules_of_its_claim(ledger: Ledger) -> None:
    committed, returned = await ledger.session(test=1.0, style=0.5), await ledger.session(test=1.0, style=0.5)
    first, second = await ledger.claim(), await ledger.claim()
    assert first.claim_id is not None
    assert second.claim_id is not None
    await ledger.reconfigure(rewards={"combine": "min"})
    assert await ledger.of(committed) == ("leased", 1.5, None)
    await ledger.commit(first)
    assert await ledger.of(committed) == ("consumed", 1.5, None)
    await ledger.claims.release(ledger.world.run, second.claim_id)
    assert await ledger.of(returned) == ("ready", 0.5, None)


async def test_a_session_without_a_reward_by_the_new_rules_is_not_handed_out(ledger: Ledger) -> None:
    """Even if a proxy with the old rules has just made it ready."""
    session = await ledger.session(style=1.0)
    settings = RunSettings.model_validate({"name": "policy", "model": "base/model", "reward_weights": {"style": 0}})
    await ledger.world.runs.ensure(settings)
    assert (await ledger.of(session))[0] == "ready"
    assert (await ledger.claim()).claim_id is None
    assert await ledger.of(session) == ("pending", None, None)


async def test_applying_rules_continues_after_a_crash(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "ENTRIES_AT_ONCE", 1)
    sessions = [await ledger.session(reward=1.0) for _ in range(3)]
    read, calls = RulesRepository.entries, 0

    def dies(repository: RulesRepository, table: type[RewardRow], after: int, limit: int) -> list[Any]:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise RuntimeError("power cut")
        return read(repository, table, after, limit)

    monkeypatch.setattr(RulesRepository, "entries", dies)
    with pytest.raises(RuntimeError, match="power cut"):
        await ledger.reconfigure(reward_weights={"reward": 2.0})
    assert [(await ledger.of(session))[1] for session in sessions] == [2.0, 1.0, 1.0]
    await ledger.feedback.apply_changed_rules()
    assert [(await ledger.of(session))[1] for session in sessions] == [2.0, 2.0, 2.0]


async def test_the_ledger_is_not_read_without_a_change_of_rules(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    await ledger.session(reward=1.0)

    def entries(_repository: RulesRepository, *_page: object) -> list[Any]:
        raise AssertionError("the ledger was read")

    monkeypatch.setattr(RulesRepository, "entries", entries)
    await ledger.reconfigure(session_idle_seconds=5)
    with pytest.raises(AssertionError, match="ledger was read"):
        await ledger.reconfigure(rewards={"sources": "mean"})
