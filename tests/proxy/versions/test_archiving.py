"""A trainer that holds a claim when its run is archived."""

from __future__ import annotations

from pathlib import Path

import pytest

from proxy.claims.service import ClaimService
from proxy.contract.claim import ClaimRequest
from proxy.errors import Conflict
from proxy.runs.deletion import RunDeletion
from proxy.runs.switch import RunSwitch
from tests.proxy.turns.world import World
from tests.proxy.versions.publishing import commit_request, publish, versions_of


async def test_a_claim_outlives_the_archiving_of_its_run(world: World, tmp_path: Path) -> None:
    claims = ClaimService(database=world.database, clock=world.clock, signals=world.signals)
    await world.ready()
    await world.ready()
    batch = await claims.claim(world.run, ClaimRequest(trainer="t", want=1))
    assert batch.claim_id is not None
    await RunSwitch(world.database, world.signals, world.clock).archive("policy")
    deletion = RunDeletion(
        database=world.database, signals=world.signals, clock=world.clock, weights_dir=tmp_path / "none"
    )
    with pytest.raises(Conflict, match="a trainer works on trajectories"):
        await deletion.delete("policy", confirm="policy", is_served=False)
    assert (await claims.claim(world.run, ClaimRequest(trainer="t", want=1))).claim_id is None
    reply = await versions_of(world).commit(world.run, commit_request([batch.claim_id], 0, publish(tmp_path)))
    assert reply.version == 1
    assert await deletion.delete("policy", confirm="policy", is_served=False)
