"""A session erased while a trainer holds it: the step is recorded, and no content comes back."""

from __future__ import annotations

from pathlib import Path

import msgspec

from proxy.auth.service import Credentials
from proxy.claims.service import ClaimService
from proxy.contract.claim import ClaimRequest
from proxy.contract.step import TokenAudit
from proxy.database.tables import TokenAuditRow
from proxy.retention.erasing import EraseService, ErasureTarget, LearntFrom
from tests.proxy.turns.world import World
from tests.proxy.versions.publishing import commit_request, publish, versions_of


async def test_its_commit_keeps_no_tokens_of_it(world: World, tmp_path: Path) -> None:
    erased, other = await world.ready(), await world.ready()
    claims = ClaimService(database=world.database, clock=world.clock, signals=world.signals)
    batch = await claims.claim(world.run, ClaimRequest(trainer="t", want=2))
    assert batch.claim_id is not None
    credentials = Credentials(world.database, b"s" * 32, world.clock)
    erasing = EraseService(world.database, world.runs, credentials, world.signals, world.clock)
    assert (await erasing.erase(ErasureTarget(session=erased))).leased == 1
    request = commit_request([batch.claim_id], 0, publish(tmp_path))
    turns = {group.trajectories[0].session_id: group.trajectories[0].turns[0].id for group in batch.groups}
    audits = tuple(
        TokenAudit(
            session_id=session_id,
            turn_id=turn_id,
            logprobs=(-0.5,),
            engine_logprobs=(-0.5,),
            advantages=(1.0,),
            staleness=(0,),
            clipped=(False,),
        )
        for session_id, turn_id in turns.items()
    )
    request = msgspec.structs.replace(request, step=msgspec.structs.replace(request.step, tokens=audits))
    versions = versions_of(world)
    assert (await versions.commit(await world.current_run(), request)).version == 1
    assert [row.session_id for row in await world.rows(TokenAuditRow)] == [other]
    report = await erasing.erase(ErasureTarget(session=erased))
    assert report.versions == (LearntFrom(run="policy", version=1, sessions=1),)
    assert (await world.session_row(erased)).training == "consumed"
