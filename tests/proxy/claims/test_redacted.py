"""Redacted ranges of turns reach the trainer."""

from __future__ import annotations

import msgspec

from proxy.claims.service import ClaimService
from proxy.contract.claim import ClaimedBatch, ClaimRequest, decode, encode
from tests.proxy.turns.world import World


async def test_a_claim_contains_the_redacted_ranges(world: World) -> None:
    session_id = await world.session()
    record = world.record(session_id)
    turn = msgspec.structs.replace(record.turn, masked=((1, 4),))
    await world.store.record(msgspec.structs.replace(record, turn=turn))
    await world.turn(session_id)
    await world.reward(session_id, 1.0)
    claims = ClaimService(database=world.database, clock=world.clock, signals=world.signals)
    batch = await claims.claim(world.run, ClaimRequest(trainer="t", want=1))
    received = decode(encode(batch), ClaimedBatch)
    turns = received.groups[0].trajectories[0].turns
    assert [one.masked for one in turns] == [((1, 4),), ()]
    assert [list(one.learnt) for one in turns] == [[1], [0, 1]]
