"""Old weights are removed, and weights that are still needed are kept."""

from __future__ import annotations

from pathlib import Path

import pytest
from sqlalchemy import update

from proxy.claims.service import ClaimService
from proxy.contract.claim import ClaimRequest
from proxy.contract.identifiers import ClaimId
from proxy.contract.policy import PruneRequest
from proxy.database.tables import PolicyVersionRow, RunRow
from proxy.errors import InvalidRequest
from proxy.versions.retention import WeightRetention
from tests.proxy.turns.world import World
from tests.proxy.versions.publishing import commit_request, publish, versions_of


@pytest.fixture
def retention(world: World) -> WeightRetention:
    return WeightRetention(database=world.database, clock=world.clock, signals=world.signals)


async def commit_versions(world: World, directory: Path, count: int) -> list[str]:
    """Commit versions 1 to `count` and return their uris; only version 0 is served."""
    claims = ClaimService(database=world.database, clock=world.clock, signals=world.signals)
    versions = versions_of(world)
    uris = []
    for parent in range(count):
        await world.ready(version=parent)
        batch = await claims.claim(world.run, ClaimRequest(trainer="t", want=1))
        weights = publish(directory)
        await versions.commit(world.run, commit_request([ClaimId(str(batch.claim_id))], parent, weights))
        uris.append(weights.uri)
    return uris


async def removed(world: World) -> list[int]:
    return sorted(row.version for row in await world.rows(PolicyVersionRow) if row.weights_removed_at is not None)


async def test_only_sessions_beyond_the_newest_are_emptied(
    world: World, retention: WeightRetention, tmp_path: Path
) -> None:
    uris = await commit_versions(world, tmp_path, 5)
    reply = await retention.prune(world.run, PruneRequest(keep=2, present=tuple(reversed(uris))))
    assert reply.remove == tuple(uris[:3])
    assert await removed(world) == [1, 2, 3]
    assert await world.events("weights.removed") == [{"versions": [1, 2, 3], "keep": 2}]
    listed = await versions_of(world).list_(world.run)
    assert [view.version for view in listed if view.weights_removed_at == world.clock()] == [3, 2, 1]


async def test_a_repeated_request_gets_the_same_answer_and_marks_nothing_again(
    world: World, retention: WeightRetention, tmp_path: Path
) -> None:
    uris = await commit_versions(world, tmp_path, 3)
    request = PruneRequest(keep=1, present=tuple(uris))
    first = await retention.prune(world.run, request)
    world.clock.now += 10
    assert await retention.prune(world.run, request) == first
    assert len(await world.events("weights.removed")) == 1
    assert {row.weights_removed_at for row in await world.rows(PolicyVersionRow)} == {None, world.clock() - 10}


async def test_versions_that_engines_serve_and_the_head_are_kept(
    world: World, retention: WeightRetention, tmp_path: Path
) -> None:
    uris = await commit_versions(world, tmp_path, 4)
    await world.database.commit(lambda connection: connection.execute(update(RunRow).values(serving_version=2)))
    reply = await retention.prune(world.run, PruneRequest(keep=1, present=tuple(uris)))
    assert reply.remove == (uris[0], uris[2])


async def test_every_nth_version_is_kept(world: World, retention: WeightRetention, tmp_path: Path) -> None:
    uris = await commit_versions(world, tmp_path, 5)
    reply = await retention.prune(world.run, PruneRequest(keep=1, keep_every=2, present=tuple(uris)))
    assert reply.remove == (uris[0], uris[2])
    with pytest.raises(InvalidRequest, match="keep_every"):
        await retention.prune(world.run, PruneRequest(keep=1, keep_every=0, present=()))


async def test_weights_that_the_trainer_does_not_name_are_kept(
    world: World, retention: WeightRetention, tmp_path: Path
) -> None:
    """The trainer needs some of them as parents of optimiser states."""
    uris = await commit_versions(world, tmp_path, 4)
    reply = await retention.prune(world.run, PruneRequest(keep=1, present=(uris[1], "/not/ours")))
    assert reply.remove == (uris[1],)
    assert await removed(world) == [2]


async def test_wrong_wishes_are_refused(world: World, retention: WeightRetention) -> None:
    with pytest.raises(InvalidRequest, match="keep"):
        await retention.prune(world.run, PruneRequest(keep=0, present=()))
    with pytest.raises(InvalidRequest, match="present"):
        await retention.prune(world.run, PruneRequest(keep=1, present=("x",) * 10_001))
