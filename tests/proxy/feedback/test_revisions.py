"""Trained rewards and the ledger's current ones: revisions are exact through commits, releases and expired leases."""

from __future__ import annotations

import random
from typing import Any

import pytest
from sqlalchemy import select

from proxy.contract.claim import ClaimedBatch
from proxy.contract.identifiers import ClaimId, SessionId
from proxy.contract.reward import RewardRules
from proxy.database.tables import RewardRow
from proxy.lifecycle.combining import LedgerEntry, SessionRewards, session_rewards
from tests.proxy.feedback.ledger import Ledger

RULES: tuple[dict[str, Any], ...] = ({}, {"rewards": {"combine": "min"}}, {"reward_weights": {"style": 0.0}})
"""Settings with which a run is started in turn."""


async def test_a_reward_after_training_revises_and_the_old_value_again_does_not(ledger: Ledger) -> None:
    session = await ledger.session(reward=1.0)
    await ledger.commit(await ledger.claim())
    assert (await ledger.of(session))[2] is None
    await ledger.say(session, reward=0.0)
    assert await ledger.of(session) == ("consumed", 0.0, ledger.world.clock.now)
    await ledger.say(session, reward=1.0)
    assert await ledger.of(session) == ("consumed", 1.0, None)
    await ledger.say(session, note=2.0)
    assert await ledger.of(session) == ("consumed", 3.0, ledger.world.clock.now)


async def test_a_turns_reward_after_training_revises(ledger: Ledger) -> None:
    session = await ledger.session(reward=1.0)
    turn = (await ledger.world.turn(session)).turn.id
    await ledger.commit(await ledger.claim())
    await ledger.say(session, turn, reward=0.0)
    assert await ledger.of(session) == ("consumed", 1.0, ledger.world.clock.now)


async def test_a_reward_during_the_lease_revises_with_the_commit_and_counts_after_a_release(ledger: Ledger) -> None:
    committed, returned = await ledger.session(reward=1.0), await ledger.session(reward=1.0)
    first, second = await ledger.claim(), await ledger.claim()
    assert second.claim_id is not None
    await ledger.say(committed, reward=0.25)
    said_at = ledger.world.clock.now
    await ledger.say(returned, reward=0.5)
    assert await ledger.of(committed) == ("leased", 0.25, None)
    ledger.world.clock.now += 10
    await ledger.commit(first)
    assert await ledger.of(committed) == ("consumed", 0.25, said_at)
    await ledger.claims.release(ledger.world.run, second.claim_id)
    assert await ledger.of(returned) == ("ready", 0.5, None)
    again = await ledger.claim()
    assert again.groups[0].trajectories[0].reward == 0.5
    await ledger.commit(again)
    assert await ledger.of(returned) == ("consumed", 0.5, None)


async def test_an_expired_lease_forgets_what_it_handed_out(ledger: Ledger) -> None:
    session = await ledger.session(reward=1.0)
    await ledger.claim()
    await ledger.say(session, reward=0.0)
    ledger.world.clock.now += ledger.world.run.settings.lease_seconds + 1
    await ledger.claims.expire()
    assert await ledger.of(session) == ("ready", 0.0, None)
    again = await ledger.claim()
    assert again.groups[0].trajectories[0].reward == 0.0
    await ledger.commit(again)
    assert await ledger.of(session) == ("consumed", 0.0, None)


class Account:
    """The expected state of a store with revisions, computed beside it."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._handed: dict[SessionId, tuple[SessionRewards, RewardRules]] = {}
        self._trained: dict[SessionId, tuple[SessionRewards, RewardRules]] = {}

    async def claimed(self, batch: ClaimedBatch) -> None:
        rules = (await self._ledger.world.current_run()).settings.reward_rules
        for group in batch.groups:
            for trajectory in group.trajectories:
                entries = await self._entries(trajectory.session_id)
                self._handed[trajectory.session_id] = (session_rewards(entries, rules), rules)
                assert trajectory.reward == session_rewards(entries, rules).reward

    def ended(self, batch: ClaimedBatch, *, committed: bool) -> None:
        for group in batch.groups:
            for trajectory in group.trajectories:
                handed = self._handed.pop(trajectory.session_id)
                if committed:
                    self._trained[trajectory.session_id] = handed

    async def check(self, session_id: SessionId) -> None:
        training, reward, revised_at = await self._ledger.of(session_id)
        entries = await self._entries(session_id)
        trained = self._trained.get(session_id)
        assert (training == "consumed") == (trained is not None)
        assert (training == "leased") == (session_id in self._handed)
        rules = (await self._ledger.world.current_run()).settings.reward_rules
        _, rules = trained or self._handed.get(session_id) or (None, rules)
        now = session_rewards(entries, rules)
        assert reward == now.reward
        if trained is None or not now.differs_from(trained[0]):
            assert revised_at is None
        else:
            assert revised_at == max(entry.created_at for entry in entries if entry.id not in trained[0].reward_ids)

    async def _entries(self, session_id: SessionId) -> list[LedgerEntry]:
        columns = [getattr(RewardRow, name) for name in LedgerEntry.__struct_fields__]
        statement = select(*columns).where(RewardRow.session_id == session_id).order_by(RewardRow.sequence)
        return await self._ledger.world.database.read(
            lambda connection: [LedgerEntry(**row._mapping) for row in connection.execute(statement)]
        )


@pytest.mark.parametrize("seed", range(3))
async def test_figures_stay_correct_after_any_sequence_of_events(ledger: Ledger, seed: int) -> None:
    draw, account = random.Random(seed), Account(ledger)
    turns: dict[SessionId, str] = {}
    claims: list[ClaimedBatch] = []
    for _ in range(3):
        session = await ledger.session(reward=1.0)
        turns[session] = (await ledger.world.turn(session)).turn.id
    for _ in range(30):
        match draw.choice(("say", "say", "say", "claim", "commit", "release", "expire", "configure")):
            case "say":
                session = draw.choice(list(turns))
                turn = draw.choice((None, None, turns[session]))
                await ledger.say(session, turn, **{draw.choice(("reward", "style")): float(draw.randrange(3))})
            case "claim":
                batch = await ledger.claim()
                if batch.claim_id is not None:
                    await account.claimed(batch)
                    claims.append(batch)
            case "commit" if claims:
                batch = claims.pop(0)
                await ledger.commit(batch)
                account.ended(batch, committed=True)
            case "release" if claims:
                batch = claims.pop()
                await ledger.claims.release(ledger.world.run, ClaimId(str(batch.claim_id)))
                account.ended(batch, committed=False)
            case "expire":
                ledger.world.clock.now += ledger.world.run.settings.lease_seconds
                await ledger.claims.expire()
                for batch in claims:
                    account.ended(batch, committed=False)
                claims.clear()
            case "configure":
                await ledger.reconfigure(**draw.choice(RULES))
        for session in turns:
            await account.check(session)
