"""Claims that end before their lease has passed, and the list of claims."""

from __future__ import annotations

import pytest

from proxy.claims.service import ClaimService
from proxy.contract.claim import ClaimedBatch, ClaimRequest
from proxy.errors import InvalidRequest
from tests.proxy.turns.world import World


@pytest.fixture
def claims(world: World) -> ClaimService:
    return ClaimService(database=world.database, clock=world.clock, signals=world.signals)


async def claim(world: World, claims: ClaimService, process: str | None, trainer: str = "t") -> ClaimedBatch:
    batch = await claims.claim(world.run, ClaimRequest(trainer=trainer, process=process, want=1))
    assert batch.claim_id is not None
    return batch


def sessions(batch: ClaimedBatch) -> list[str]:
    return [trajectory.session_id for group in batch.groups for trajectory in group.trajectories]


async def test_only_a_dead_trainers_claims_are_released_at_once(world: World, claims: ClaimService) -> None:
    for _ in range(4):
        await world.ready()
    dead = [await claim(world, claims, "dead"), await claim(world, claims, "dead")]
    alive = [await claim(world, claims, "alive"), await claim(world, claims, None)]
    released = await claims.release_abandoned(world.run, "dead")
    assert released.claim_ids == tuple(batch.claim_id for batch in dead)
    again = [await claim(world, claims, "next"), await claim(world, claims, "next")]
    assert sorted(map(sessions, again)) == sorted(map(sessions, dead))
    for batch in alive:
        assert batch.claim_id is not None
        await claims.heartbeat(world.run, batch.claim_id)


async def test_reporting_a_dead_trainer_again_changes_nothing(world: World, claims: ClaimService) -> None:
    session = await world.ready()
    await claim(world, claims, "dead")
    assert len((await claims.release_abandoned(world.run, "dead")).claim_ids) == 1
    await claim(world, claims, "next")
    assert (await claims.release_abandoned(world.run, "dead")).claim_ids == ()
    assert (await world.session_row(session)).training == "leased"
    assert [event["sessions"] for event in await world.events("claim.released")] == [1]


async def test_a_lease_made_while_the_trainer_disconnected_is_released_at_once(
    world: World, claims: ClaimService
) -> None:
    session = await world.ready()
    looks = 0

    async def gone() -> bool:
        nonlocal looks
        looks += 1
        return looks > 1

    await claims.claim(world.run, ClaimRequest(trainer="t", want=1), abandoned=gone)
    row = await world.session_row(session)
    assert (row.training, row.claim_id) == ("ready", None)


async def test_claims_are_listed_with_the_leased_ones_first(world: World, claims: ClaimService) -> None:
    await world.ready()
    await world.ready()
    first = await claim(world, claims, "one", trainer="first")
    world.clock.now += 1
    second = await claim(world, claims, "two", trainer="second")
    assert second.claim_id is not None
    await claims.release(world.run, second.claim_id)
    listed = await claims.list_(world.run, limit=10)
    assert [(view.id, view.trainer, view.process, view.state.value, view.sessions) for view in listed] == [
        (first.claim_id, "first", "one", "leased", 1),
        (second.claim_id, "second", "two", "released", 1),
    ]
    world.clock.now += 1000
    assert {view.state.value for view in await claims.list_(world.run, limit=10)} == {"expired", "released"}
    assert len(await claims.list_(world.run, limit=1)) == 1


@pytest.mark.parametrize("process", ["", "x" * 65])
async def test_the_length_of_a_process_name_is_bounded(world: World, claims: ClaimService, process: str) -> None:
    with pytest.raises(InvalidRequest, match="process"):
        await claims.claim(world.run, ClaimRequest(trainer="t", process=process, want=1))
