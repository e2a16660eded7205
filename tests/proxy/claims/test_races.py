"""Two proxies on one store at the same time: each change takes effect once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from proxy.claims.service import ClaimService
from proxy.contract.claim import ClaimRequest
from proxy.contract.identifiers import ClaimId
from proxy.database.tables import ClaimRow, SessionRow, TurnRow
from proxy.errors import Conflict
from tests.proxy.turns.world import World, open_world

ROUNDS = 4


class Proxy:
    """The claim service of one proxy."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.claims = ClaimService(database=world.database, clock=world.clock, signals=world.signals)

    async def claim(self, want: int) -> list[str]:
        """Claim, and return the session ids of the batch."""
        request = ClaimRequest(trainer="t", want=want, at_least=1, max_staleness=0)
        batch = await self.claims.claim(self.world.run, request)
        return [trajectory.session_id for group in batch.groups for trajectory in group.trajectories]


@pytest.fixture
async def proxies(database_url: str) -> AsyncIterator[tuple[Proxy, Proxy]]:
    async with open_world(database_url) as first, open_world(database_url, clock=first.clock) as second:
        yield Proxy(first), Proxy(second)


async def leased(proxy: Proxy) -> ClaimId:
    await proxy.world.ready()
    request = ClaimRequest(trainer="t", want=1, at_least=1, max_staleness=0)
    claim_id = (await proxy.claims.claim(proxy.world.run, request)).claim_id
    assert claim_id is not None
    return claim_id


async def test_two_proxies_never_hand_out_the_same_session(proxies: tuple[Proxy, Proxy]) -> None:
    first, second = proxies
    for _ in range(ROUNDS):
        ready = {await first.world.ready() for _ in range(6)}
        handed = await asyncio.gather(*(proxy.claim(3) for proxy in (first, second, first, second)))
        found = [session for claimed in handed for session in claimed]
        assert len(found) == len(set(found))
        assert set(found) <= ready
        left = [session for session in ready if session not in found]
        assert sorted(await first.claim(6)) == sorted(left)


async def test_two_proxies_expire_a_lease_once(proxies: tuple[Proxy, Proxy]) -> None:
    first, second = proxies
    for number in range(1, ROUNDS + 1):
        await leased(first)
        first.world.clock.now += first.world.run.settings.lease_seconds
        await asyncio.gather(first.claims.expire(), second.claims.expire())
        assert len(await first.world.events("claim.expired")) == number
        assert len(await second.world.rows(ClaimRow)) == number
    assert len(await second.claim(ROUNDS)) == ROUNDS


async def test_a_lease_extended_during_a_sweep_is_live_or_expired_for_both_proxies(
    proxies: tuple[Proxy, Proxy],
) -> None:
    first, second = proxies
    for _ in range(ROUNDS):
        claim_id = await leased(first)
        first.world.clock.now += first.world.run.settings.lease_seconds - 1
        extended, expired = await asyncio.gather(
            first.claims.heartbeat(first.world.run, claim_id), second.claims.expire(), return_exceptions=True
        )
        assert not isinstance(extended, BaseException)
        assert expired == 0
        await asyncio.gather(
            first.claims.release(first.world.run, claim_id), second.claims.release(second.world.run, claim_id)
        )
        with pytest.raises(Conflict):
            await first.claims.heartbeat(first.world.run, claim_id)
        assert len(await second.claim(1)) == 1
        first.world.clock.now += 2 * first.world.run.settings.lease_seconds
        await second.claims.expire()
        assert len(await second.claim(9)) >= 1


async def test_turns_of_one_session_by_two_proxies_are_numbered_without_gaps(proxies: tuple[Proxy, Proxy]) -> None:
    first, second = proxies
    session = await first.world.session()
    await asyncio.gather(
        *(proxy.world.turn(session, conversation=f"{number}") for number in range(20) for proxy in (first, second))
    )
    assert sorted(row.ordinal for row in await first.world.rows(TurnRow)) == list(range(40))
    assert (await first.world.session_row(session)).turn_count == 40


async def test_rewards_by_two_proxies_all_count(proxies: tuple[Proxy, Proxy]) -> None:
    """Each reward settles the session: the second proxy sees the first one's."""
    first, second = proxies
    for _ in range(ROUNDS):
        session = await first.world.session()
        await first.world.turn(session)
        await asyncio.gather(
            *(
                proxy.world.reward(session, 1.0, name=f"{number} {who}", final=number == 0)
                for number in range(4)
                for who, proxy in enumerate((first, second))
            )
        )
        row = await first.world.session_row(session)
        assert (row.reward, row.training, row.state) == (8.0, "ready", "ended")


@pytest.mark.parametrize("change", ["claimed", "turn", "head", "paused", "nothing"])
async def test_changes_between_the_selection_and_the_lease_are_seen(
    proxies: tuple[Proxy, Proxy], change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = proxies
    oldest, newer = await first.world.ready(), await first.world.ready()
    commit = first.world.database.commit
    changes = iter([change])

    async def after_the_change(*args: Any, **kwargs: Any) -> Any:
        match next(changes, "nothing"):
            case "claimed":
                assert await second.claim(1) == [oldest]
            case "turn":
                await second.world.turn(oldest)
            case "head":
                await second.world.set_run(head_version=1)
            case "paused":
                await second.world.set_run(state="paused")
        return await commit(*args, **kwargs)

    monkeypatch.setattr(first.world.database, "commit", after_the_change)
    request = ClaimRequest(trainer="t", want=1, at_least=1, max_staleness=0)
    batch = await first.claims.claim(first.world.run, request)
    handed = {one.session_id: len(one.turns) for group in batch.groups for one in group.trajectories}
    assert handed == {"claimed": {newer: 1}, "turn": {oldest: 2}, "nothing": {oldest: 1}}.get(change, {})
    states = {row.id: row.training for row in await second.world.rows(SessionRow)}
    assert states[newer] == {"claimed": "leased", "head": "stale"}.get(change, "ready")
