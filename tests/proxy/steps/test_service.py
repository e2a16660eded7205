"""The batch of a committed step equals the claimed one, whatever happened later."""

from __future__ import annotations

from pathlib import Path

import pytest
from sqlalchemy import delete

from proxy.claims.service import ClaimService
from proxy.contract.claim import ClaimedBatch, ClaimRequest
from proxy.contract.identifiers import ClaimId, SessionId
from proxy.database.tables import TurnRow
from proxy.errors import InvalidRequest, NotFound
from proxy.steps.service import StepService
from proxy.versions.service import VersionService
from tests.proxy.turns.world import World
from tests.proxy.versions.publishing import commit_request, inspector, publish


class Training:
    """Claims and commits for a world's run."""

    def __init__(self, world: World, weights: Path) -> None:
        wiring = {"database": world.database, "clock": world.clock, "signals": world.signals}
        self.world = world
        self.weights = weights
        self.claims = ClaimService(**wiring)  # type: ignore[arg-type]
        self.versions = VersionService(**wiring, inspector=inspector())  # type: ignore[arg-type]
        self.steps = StepService(database=world.database)

    async def claim(self, want: int) -> ClaimedBatch:
        return await self.claims.claim(self.world.run, ClaimRequest(trainer="t", want=want))

    async def commit(self, *batches: ClaimedBatch, parent: int = 0) -> None:
        claim_ids = [ClaimId(str(batch.claim_id)) for batch in batches]
        await self.versions.commit(self.world.run, commit_request(claim_ids, parent, publish(self.weights)))


@pytest.fixture
def training(world: World, tmp_path: Path) -> Training:
    return Training(world, tmp_path / "weights")


async def conversation(world: World, reward: float, turn_reward: float) -> SessionId:
    """Create a session with two branches from one turn, one of which has a reward of its own."""
    session = await world.session()
    first = await world.turn(session, conversation="a")
    second = await world.turn(session, parent=first, prefix_tokens=5, output_ids=(6, 7, 8), conversation="b")
    await world.turn(session, parent=first, prefix_tokens=4, prompt_ids=(9,), conversation="c", temperature=0.0)
    await world.reward(session, turn_reward, turn_id=second.turn.id, final=False)
    await world.reward(session, reward)
    return session


async def test_the_batch_equals_the_claimed_one(world: World, training: Training) -> None:
    group = await world.group(size=2)
    await world.ready(1.0, group=group)
    await conversation(world, 0.5, 2.0)
    await world.ready(0.0, group=group)
    other = await world.group(size=2)
    for reward in (0.25, -1.0):
        await world.ready(reward, group=other)
    first = await training.claim(3)
    second = await training.claim(2)
    await training.commit(first, second)
    batch = await training.steps.batch(world.run, 1)
    assert [claimed.groups for claimed in batch.claims] == [first.groups, second.groups]
    assert [claimed.claim_id for claimed in batch.claims] == [first.claim_id, second.claim_id]
    assert [claimed.base_version for claimed in batch.claims] == [0, 0]
    assert (batch.version, batch.parent.version, batch.parent.weights, batch.missing) == (1, 0, None, ())
    assert (batch.seed, batch.config_hash, batch.metrics) == (7, "c" * 64, {"loss": 0.25})


async def test_changes_after_the_claim_have_no_effect(world: World, training: Training) -> None:
    session = await conversation(world, 0.5, 2.0)
    claimed = await training.claim(1)
    turn = claimed.groups[0].trajectories[0].turns[1].id
    await world.turn(session, conversation="during")
    await world.reward(session, 7.0, after_training=True)
    await training.commit(claimed)
    await world.reward(session, 8.0, after_training=True)
    await world.reward(session, 9.0, turn_id=turn, final=False, after_training=True)
    await world.turn(session, conversation="later")
    batch = await training.steps.batch(world.run, 1)
    assert batch.claims[0].groups == claimed.groups
    assert batch.missing == ()


async def test_a_parent_has_its_weights(world: World, training: Training) -> None:
    for parent in range(2):
        await world.ready()
        await training.commit(await training.claim(1), parent=parent)
    first, second = [await training.steps.batch(world.run, version) for version in (1, 2)]
    assert second.parent.weights == first.weights
    assert (second.parent_removed, second.removed) == (False, False)


async def test_an_incomplete_session_is_listed_as_missing(world: World, training: Training) -> None:
    whole, broken = await world.ready(), await conversation(world, 1.0, 1.0)
    await training.commit(await training.claim(2))
    await world.database.commit(
        lambda connection: connection.execute(
            delete(TurnRow).where(TurnRow.session_id == broken, TurnRow.ordinal == 2)
        )
    )
    batch = await training.steps.batch(world.run, 1)
    assert batch.missing == (broken,)
    assert whole in {found.session_id for group in batch.claims[0].groups for found in group.trajectories}


async def test_the_base_model_and_unknown_versions_have_no_step(world: World, training: Training) -> None:
    with pytest.raises(InvalidRequest, match="what the run began from"):
        await training.steps.batch(world.run, 0)
    with pytest.raises(NotFound, match="no version 1"):
        await training.steps.batch(world.run, 1)
