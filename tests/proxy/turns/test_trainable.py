"""The query and the assembly of trajectories agree on which turns can be trained."""

from __future__ import annotations

import random

from proxy.contract.identifiers import SessionId
from proxy.contract.states import Outcome
from proxy.contract.turn import TurnState
from proxy.lifecycle.trainable import teaching_sessions
from proxy.turns.assembly import trainable_turns
from proxy.turns.service import TurnRecord
from tests.proxy.turns.world import World


async def _random_session(world: World, dice: random.Random) -> tuple[SessionId, list[TurnRecord]]:
    session_id = await world.session()
    records: list[TurnRecord] = []
    for _ in range(dice.randint(0, 3)):
        parent = dice.choice([None, *records])
        record = world.record(
            session_id,
            parent=parent,
            prefix_tokens=0 if parent is None else dice.randint(0, parent.prompt_token_count + 1),
            output_ids=dice.choice([(), (4,), (4, 5)]),
            state=dice.choice([TurnState.FAILED, TurnState.TRUNCATED, TurnState.TRUNCATED, TurnState.COMPLETE]),
            temperature=dice.choice([0.0, 1.0, 1.0, 0.7]),
        )
        records.append(record)
    if records:
        await world.store.record(*records)
    return session_id, records


async def test_the_store_and_the_assembly_agree(world: World) -> None:
    dice = random.Random(5)
    sessions = [await _random_session(world, dice) for _ in range(120)]
    found = await world.database.read(
        lambda connection: teaching_sessions(connection, [session_id for session_id, _ in sessions])
    )
    expected = {
        session_id for session_id, records in sessions if trainable_turns([record.turn for record in records])
    }
    assert found == expected
    assert 10 < len(expected) < 110


async def test_a_session_with_only_a_failed_turn_is_never_ready(world: World) -> None:
    session_id = await world.session()
    await world.turn(session_id, state=TurnState.FAILED, output_ids=())
    await world.reward(session_id, 1.0)
    assert (await world.session_row(session_id)).training == "excluded"
    await world.turn(session_id)
    assert (await world.session_row(session_id)).training == "ready", "a call that was still running came in"


async def test_a_session_with_only_an_abandoned_turn_waits_for_no_reward(world: World) -> None:
    session_id = await world.session()
    await world.turn(session_id, state=TurnState.TRUNCATED)
    await world.end(session_id, Outcome.COMPLETED)
    assert (await world.session_row(session_id)).training == "excluded"
