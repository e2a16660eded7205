"""Rules that change while there are rewards: what is not trained follows, what was trained stays."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection

from proxy.contract.claim import ClaimedBatch, ClaimRequest
from proxy.contract.identifiers import SessionId
from proxy.credentials.service import Principal, PrincipalKind
from proxy.feedback import rules
from proxy.feedback.repository import RulesRepository
from proxy.feedback.service import FeedbackItem, FeedbackService
from proxy.policies.service import VersionService
from proxy.settings import RunSettings
from proxy.trajectories.claims.service import ClaimService
from tests.proxy.policies.publishing import commit_request, publish
from tests.proxy.trajectories.world import World, open_world


@pytest.fixture
async def world(database_url: str) -> AsyncIterator[World]:
    async with open_world(database_url) as opened:
        yield opened


class Ledger:
    """Feedback of the world's run, and a trainer of it."""

    def __init__(self, world: World, directory: Path) -> None:
        self.world = world
        self.directory = directory
        self.feedback = FeedbackService(world.database, world.signals, world.clock)
        self.claims = ClaimService(database=world.database, clock=world.clock, signals=world.signals)
        self.versions = VersionService(database=world.database, clock=world.clock, signals=world.signals)
        self._admin = Principal(kind=PrincipalKind.ADMIN, key_id="key", run_id=None, session_id=None)  # type: ignore[arg-type]

    async def session(self, **entries: float) -> SessionId:
        """With one turn, rewarded by name."""
        session_id = await self.world.session()
        await self.world.turn(session_id)
        if entries:
            await self.say(session_id, **entries)
        return session_id

    async def say(self, session_id: SessionId, turn: str | None = None, /, **entries: float) -> None:
        self.world.clock.now += 1
        item = FeedbackItem(entries=tuple(entries.items()), session_id=session_id, turn_id=turn, final=turn is None)
        await self.feedback.record(self._admin, [item])

    async def reconfigure(self, **settings: Any) -> None:
        """As a start with another file does."""
        await self.world.runs.ensure(RunSettings(name="policy", model="base/model", **settings))
        await self.feedback.apply_changed_rules()

    async def claim(self, want: int = 1) -> ClaimedBatch:
        run = await self.world.current_run()
        return await self.claims.claim(run, ClaimRequest(trainer="t", want=want))

    async def commit(self, batch: ClaimedBatch) -> None:
        assert batch.claim_id is not None
        head = (await self.world.current_run()).head_version
        request = commit_request([batch.claim_id], head, publish(self.directory))
        await self.versions.commit(self.world.run, request)

    async def of(self, session_id: SessionId) -> tuple[str, float | None, float | None]:
        """Training state, reward, and when it was revised."""
        row = await self.world.session_row(session_id)
        return row.training, row.reward, row.revised_at


@pytest.fixture
def ledger(world: World, tmp_path: Path) -> Ledger:
    return Ledger(world, tmp_path)


async def test_sessions_that_are_not_trained_follow_the_rules(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rules, "_AT_ONCE", 2)
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


async def test_what_was_trained_stays_as_it_was(ledger: Ledger) -> None:
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
    """Even where a proxy with the old rules has just made it ready."""
    session = await ledger.session(style=1.0)
    settings = RunSettings.model_validate({"name": "policy", "model": "base/model", "reward_weights": {"style": 0}})
    await ledger.world.runs.ensure(settings)
    assert (await ledger.of(session))[0] == "ready"
    assert (await ledger.claim()).claim_id is None
    assert await ledger.of(session) == ("pending", None, None)


async def test_applying_goes_on_after_a_crash(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "_AT_ONCE", 1)
    sessions = [await ledger.session(reward=1.0) for _ in range(3)]
    real, calls = rules._settle_some, 0

    def dies(connection: Connection, **values: Any) -> int | None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise RuntimeError("power cut")
        return real(connection, **values)

    monkeypatch.setattr(rules, "_settle_some", dies)
    with pytest.raises(RuntimeError, match="power cut"):
        await ledger.reconfigure(reward_weights={"reward": 2.0})
    assert [(await ledger.of(session))[1] for session in sessions] == [2.0, 1.0, 1.0]
    await ledger.feedback.apply_changed_rules()
    assert [(await ledger.of(session))[1] for session in sessions] == [2.0, 2.0, 2.0]


async def test_nothing_is_gone_through_where_nothing_changed(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    await ledger.session(reward=1.0)

    def entries(_repository: RulesRepository, _after: int, _limit: int) -> list[Any]:
        raise AssertionError("the ledger was gone through")

    monkeypatch.setattr(RulesRepository, "entries", entries)
    await ledger.reconfigure(session_idle_seconds=5)
    with pytest.raises(AssertionError, match="gone through"):
        await ledger.reconfigure(rewards={"sources": "mean"})


# Revisions


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
