"""A call whose engine is down moves to another engine of the run, before its first token only."""

from __future__ import annotations

import pytest

from proxy.errors import EngineUnavailable
from tests.fakes.engine import FakeEngine
from tests.proxy.calls.world import World


@pytest.fixture
def spare(world: World) -> FakeEngine:
    """Another engine of the run, which answers from the same script."""
    world.swaps.spare = spare = FakeEngine(world.engine.script, label=world.engine.label)
    return spare


@pytest.mark.parametrize("body", [{}, {"stream": True}, {"n": 3}])
async def test_a_call_moves_to_another_engine(world: World, spare: FakeEngine, body: dict[str, object]) -> None:
    world.engine.down = True
    response = await world.post(body)
    assert response.status_code == 200, response.text
    assert len(spare.requests) == body.get("n", 1)
    assert [turn.state for turn in await world.turns()] == ["complete"] * len(spare.requests)
    assert world.swaps.rechecks == 1, "the engine that is down is asked again at once"


async def test_a_call_without_a_stream_moves_when_its_engine_dies_meanwhile(world: World, spare: FakeEngine) -> None:
    world.engine.error, world.engine.error_after = EngineUnavailable("killed"), 3
    assert (await world.post({})).status_code == 200
    assert len(await world.turns()) == 1


async def test_a_stream_does_not_move_after_its_first_token(world: World, spare: FakeEngine) -> None:
    world.engine.error, world.engine.error_after = EngineUnavailable("killed"), 3
    response = await world.post({"stream": True})
    assert "engine_unavailable" in response.text
    assert not spare.requests
    assert [turn.state for turn in await world.turns()] == ["failed"]


async def test_a_call_moves_once(world: World, spare: FakeEngine) -> None:
    world.engine.down = spare.down = True
    response = await world.post({})
    assert response.status_code == 503
    assert world.swaps.rechecks == 2, "both engines are asked again"


async def test_the_work_under_way_is_counted_where_it_is_done(world: World, spare: FakeEngine) -> None:
    world.engine.down = True
    world.engine.gate.clear()
    await world.post({})
    for engine in (world.engine, spare):
        place = world.swaps.place_at(engine)
        assert (place.calls, place.load.outstanding_tokens) == (0, 0)
